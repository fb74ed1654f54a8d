// The page of `lean schedule --html`: one file without a network, with the schedule computed in the browser (cli/page). It begins
// with a batch and the cost model of the backend; both are data in it.
#pragma once

#include <string>

#include "explain/schedule_map.hpp"

namespace lean::cli {

/// Throws BadArgument where the page would show something else than the map: more than one query token, windows, several row
/// blocks of a kv head, or more than a browser draws.
[[nodiscard]] std::string schedule_page(const explain::ScheduleMap& map, const schedule::CostModel& cost_model);

}  // namespace lean::cli

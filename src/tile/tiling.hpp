// Tiling: how a call is cut up, whatever its lengths are. What a backend decides of it is all that the schedule, and whoever
// explains one, needs to know of a backend.
#pragma once

#include <cstdint>

#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean::tile {

struct Tiling {
  TileConfig config{};
  schedule::CostModel cost_model{};
  std::int32_t workers = 1;
  bool stair = false;  // the line is a stair's whatever the lengths, and dealt out by make_stair_plan() (schedule/level_line.hpp)
};

}  // namespace lean::tile

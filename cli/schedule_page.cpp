#include "cli/schedule_page.hpp"

#include <nlohmann/json.hpp>

#include <string_view>

#include "cli/bad_argument.hpp"
#include "lean_page/files.hpp"

namespace lean::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxRequests = 1024;
constexpr std::int64_t kMaxOutputs = 50'000;  // of four pictures that follow a slider

void require_drawable(const explain::ScheduleMap& map) {
  for (const schedule::SequenceWork& sequence : map.sequences) {
    if (sequence.q_tokens != 1)
      throw BadArgument("--n-q", std::to_string(sequence.q_tokens), "1 with --html, whose page has decode steps");
  }
  const std::int32_t left = map.shape.reach.left;  // to the right of a single query token there is nothing
  if (left >= 0) throw BadArgument("--window-left", std::to_string(left), "-1 with --html, whose page has no windows");
  if (map.shape.group > map.shape.q_rows) {
    throw BadArgument("--q-heads", std::to_string(map.shape.group * map.shape.kv_heads),
                      "up to " + std::to_string(map.shape.q_rows) + " times --kv-heads with --html");
  }
  if (map.sequences.size() > kMaxRequests)
    throw BadArgument("the requests", std::to_string(map.sequences.size()), "up to 1024 with --html");
  if (map.outputs > kMaxOutputs) {
    throw BadArgument("requests x --kv-heads", std::to_string(map.outputs),
                      "up to " + std::to_string(kMaxOutputs) + " with --html");
  }
}

Json batch_of(const explain::ScheduleMap& map, const schedule::CostModel& model) {
  Json lengths = Json::array();
  for (const schedule::SequenceWork& sequence : map.sequences) lengths.push_back(sequence.kv_tokens);
  return {{"lengths", lengths},
          {"kv_heads", map.shape.kv_heads},
          {"group", map.shape.group},
          {"tile_tokens", map.shape.tile_tokens},
          {"workers", map.workers_asked},
          {"cost_model",
           {{"tile_units", model.tile_units},
            {"free_rows", model.free_rows},
            {"row_units", model.row_units},
            {"segment_units", model.segment_units},
            {"min_worker_tiles", model.min_worker_tiles},
            {"sliver_tiles", model.sliver_tiles},
            {"alike_percent", model.alike_percent},
            {"align_percent", model.align_percent},
            {"whole_percent", model.whole_percent},
            {"align_units", model.align_units},
            {"short_tiles", model.short_tiles},
            {"spare_tiles", model.spare_tiles},
            {"unshared_tiles", model.unshared_tiles}}}};
}

void put(std::string& page, std::string_view place, std::string_view text) { page.replace(page.find(place), place.size(), text); }

}  // namespace

std::string schedule_page(const explain::ScheduleMap& map, const schedule::CostModel& cost_model) {
  require_drawable(map);
  std::string page(page::kHtml);
  put(page, "@batch@", batch_of(map, cost_model).dump());
  put(page, "@schedule@", page::kSchedule);
  put(page, "@view@", page::kView);
  return page;
}

}  // namespace lean::cli

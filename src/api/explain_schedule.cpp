// explain_schedule(): the schedule a call would follow, as text, JSON or SVG.
#include "explain/schedule_map.hpp"

#include <cstring>

#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "lean/lean.hpp"
#include "problem/append.hpp"

namespace lean {
namespace {

std::string explanation_of(const Problem& problem, const Options& options, ScheduleFormat format) {
  const tile::Tiling tiling = backend_of(options.backend)->tiling_of(problem, options);
  const explain::ScheduleMap map =
      explain::build_map({.lengths = LengthSource(problem),
                          .shape = schedule::line_shape_of(problem, tiling.config.q_rows, tiling.config.tile_tokens),
                          .cost_model = tiling.cost_model,
                          .policy = options.policy,
                          .workers = tiling.workers,
                          .stair = tiling.stair});
  switch (format) {
    case ScheduleFormat::kText: return explain::to_text(map);
    case ScheduleFormat::kJson: return explain::to_json(map);
    case ScheduleFormat::kSvg: return explain::to_svg({map}, {});
  }
  return {};
}

}  // namespace

std::size_t explain_schedule(const Problem& problem, const Options& options, ScheduleFormat format, char* buffer,
                             std::size_t buffer_bytes) {
  const Options resolved = resolve(options);
  if (!supports(problem, resolved).ok()) return 0;
  count_new_tokens(problem);
  const std::string text = explanation_of(problem, resolved, format);
  if (text.empty()) return 0;  // not a ScheduleFormat
  if (buffer != nullptr && buffer_bytes > 0) {
    const std::size_t kept = text.size() < buffer_bytes ? text.size() : buffer_bytes - 1;
    std::memcpy(buffer, text.data(), kept);
    buffer[kept] = '\0';
  }
  return text.size() + 1;
}

}  // namespace lean

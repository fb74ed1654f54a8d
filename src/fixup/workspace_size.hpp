// What a call needs of a workspace, from sizes, capacities and options alone: one rule for every backend, so that
// workspace_size() and decode() cannot disagree.
#pragma once

#include <cstdint>

#include "base/int_math.hpp"
#include "base/message.hpp"
#include "fixup/chunk_tree.hpp"
#include "fixup/workspace.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "tile/tile_config.hpp"

namespace lean::fixup {

static_assert(kMaxOneLevel == schedule::kOneLevelParts);

/// A bound that keeps every byte count of the workspace within 63 bits.
inline constexpr std::int64_t kMaxSlots = std::int64_t{1} << 40;

/// Slots for any lengths within the capacities: the worst case of schedule::slot_count.
[[nodiscard]] constexpr std::int64_t slot_capacity(const Policy& policy, std::int64_t outputs, std::int32_t workers) noexcept {
  if (schedule::measure_of(policy.kind) == schedule::Measure::kCost) return 2 * std::int64_t{workers};
  if (policy.kind == Policy::Kind::kDataParallel || policy.splits == 1) return 0;
  if (policy.splits > 0) return outputs * policy.splits;
  // FlashDecoding's rule splits only while outputs < 0.8 workers, into at most min(kMaxSplits, workers).
  return min_of(outputs, std::int64_t{workers} * 8 / 10) * min_of(Policy::kMaxSplits, workers);
}

/// What a call is to be given.
struct WorkspaceNeed {
  std::int64_t state_bytes = 0;
  std::int64_t scratch_bytes = 0;
};

[[nodiscard]] constexpr WorkspaceLayout workspace_layout(const Problem& problem, const Policy& policy,
                                                         const tile::TileConfig& config, std::int32_t workers) noexcept {
  const std::int64_t slots = slot_capacity(policy, schedule::output_capacity(problem, config.q_rows), workers);
  const bool second_bank = workers > kMaxOneLevel || policy.splits > kMaxOneLevel;
  std::int32_t nodes_per_slot = 1;
  if (policy.kind == Policy::Kind::kFixedChunk) {
    const std::int64_t chunk_tokens = std::int64_t{schedule::chunk_tiles_of(policy, config.tile_tokens)} * config.tile_tokens;
    nodes_per_slot = max_chunk_nodes(ceil_div(problem.kv_capacity, chunk_tokens));
  }
  return {slots, second_bank, nodes_per_slot, {config.q_rows, config.value_dim}};
}

/// Which policy goes with which fix-up, and how many slots there may be. Codes: ok, unsupported, too_large.
[[nodiscard]] inline Status check_pairing(const Problem& problem, const Options& options, const tile::TileConfig& config,
                                          std::int32_t workers) noexcept {
  if (options.fixup == Fixup::kHostBlock && options.policy.kind == Policy::Kind::kFixedSplit) {
    return refuse(
        StatusCode::kUnsupported, "options.fixup", static_cast<std::int64_t>(options.fixup),
        "host_block needs a policy whose hosts wait for higher-numbered workers only: fixed_split deals items out in turn");
  }
  if (slot_capacity(options.policy, schedule::output_capacity(problem, config.q_rows), workers) > kMaxSlots) {
    return refuse(StatusCode::kTooLarge, "options.policy.splits", options.policy.splits, "outputs x splits must not exceed 2^40");
  }
  return {};
}

}  // namespace lean::fixup

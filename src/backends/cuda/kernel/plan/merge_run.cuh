// Which partials are merged together, where they lie and who counts them (docs/fixup.md). Worked out while tiles are computed.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/segment_record.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// The partials of contributors begin, begin + step, ...; of the second bank where they are those of groups.
[[nodiscard]] __device__ __forceinline__ MergeRun partials_of(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                              std::int32_t begin, std::int32_t step, std::int32_t parts,
                                                              bool of_groups) {
  const std::int64_t slot_floats = slots.layout.slot_bytes / static_cast<std::int64_t>(sizeof(float));
  const auto* bank = reinterpret_cast<const float*>(slots.scratch) + (of_groups ? slots.layout.slots * slot_floats : 0);
  return {.first = bank + map.slot(begin) * slot_floats,
          .second = bank + map.slot(begin + step) * slot_floats,
          .pitch = step * map.stride * slot_floats,
          .parts = parts};
}

/// What of a group's contributors is merged, or of all of the output's where there is one group.
[[nodiscard]] __device__ __forceinline__ MergeRun run_of_group(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                               std::int32_t contributors, const fixup::Grouping& grouping,
                                                               std::int32_t group) {
  const std::int32_t begin = grouping.begin(group);
  MergeRun run = partials_of(slots, map, begin, 1, grouping.end(group, contributors) - begin, false);
  const std::int64_t slot = map.slot(begin);
  run.counter = &slots.counter(slot);
  if (grouping.groups > 1) run.slot = slots.group_partial(slot).o;
  return run;
}

/// What of the groups' results is merged.
[[nodiscard]] __device__ __forceinline__ MergeRun run_of_groups(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                                const fixup::Grouping& grouping) {
  MergeRun run = partials_of(slots, map, 0, grouping.size, grouping.groups, true);
  run.counter = &slots.second_counter(map.slot(0));
  return run;
}

}  // namespace lean::cuda

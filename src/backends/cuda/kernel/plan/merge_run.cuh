// Which partials are merged together, where they lie and who counts them (docs/fixup.md). Worked out while tiles are computed.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/segment_record.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// The partials of contributors begin, begin + step, ...; of the second bank where they are those of bundles.
[[nodiscard]] __device__ __forceinline__ MergeRun partials_of(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                              std::int32_t begin, std::int32_t step, std::int32_t parts,
                                                              bool of_bundles) {
  const std::int64_t slot_floats = slots.layout.slot_bytes / static_cast<std::int64_t>(sizeof(float));
  const auto* bank = reinterpret_cast<const float*>(slots.scratch) + (of_bundles ? slots.layout.slots * slot_floats : 0);
  return {.first = bank + map.slot(begin) * slot_floats,
          .second = bank + map.slot(begin + step) * slot_floats,
          .pitch = step * map.stride * slot_floats,
          .parts = parts};
}

/// What of a bundle's contributors is merged, or of all of the output's where there is one bundle.
[[nodiscard]] __device__ __forceinline__ MergeRun run_of_bundle(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                                std::int32_t contributors, const fixup::Bundling& bundling,
                                                                std::int32_t bundle, std::int32_t contributor = 0) {
  const std::int32_t begin = bundling.begin(bundle);
  MergeRun run = partials_of(slots, map, begin, 1, bundling.end(bundle, contributors) - begin, false);
  run.index = contributor - begin;
  const std::int64_t slot = map.slot(begin);
  run.counter = &slots.counter(slot);
  if (bundling.bundles > 1) run.slot = slots.bundle_partial(slot).o;
  return run;
}

/// What of the bundles' results is merged.
[[nodiscard]] __device__ __forceinline__ MergeRun run_of_bundles(const fixup::Slots& slots, const schedule::SlotMap& map,
                                                                 const fixup::Bundling& bundling, std::int32_t bundle = 0) {
  MergeRun run = partials_of(slots, map, 0, bundling.size, bundling.bundles, true);
  run.index = bundle;
  run.counter = &slots.second_counter(map.slot(0));
  return run;
}

}  // namespace lean::cuda

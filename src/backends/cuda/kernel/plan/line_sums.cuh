// What builders of a line have in common: sums over sequences, and over the lanes of a warp. They read all lengths before they
// report one that had to be clamped, so that what sums up is straight code.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/warp.cuh"
#include "base/int_math.hpp"
#include "problem/sequence.hpp"
#include "schedule/work_line.hpp"

namespace lean::cuda {

template <typename TUnits>
[[nodiscard]] __device__ inline schedule::BasicLineSums<TUnits> sum_over_warp(const schedule::BasicLineSums<TUnits>& own) {
  return {.cost = ptx::warp_sum(own.cost),
          .tiles = ptx::warp_sum(own.tiles),
          .outputs = ptx::warp_sum(own.outputs),
          .max_output_tiles = ptx::warp_max(own.max_output_tiles),
          .max_tile_cost = ptx::warp_max(own.max_tile_cost),
          .min_output_cost = ptx::warp_min(own.min_output_cost),
          .max_output_cost = ptx::warp_max(own.max_output_cost)};
}

template <typename TUnits>
[[nodiscard]] __device__ inline schedule::BasicStairSums<TUnits> sum_over_warp(const schedule::BasicStairSums<TUnits>& own) {
  return {sum_over_warp<TUnits>(static_cast<const schedule::BasicLineSums<TUnits>&>(own)), ptx::warp_sum(own.key_tiles),
          ptx::warp_max(own.max_pair_cost)};
}

template <typename TSums>
struct SequenceSums {
  TSums sums;
  bool clamped = false;  // a length had to be
};

/// Sums the sequences [begin, end), as far as they exist.
template <typename TRules>
[[nodiscard]] __device__ __forceinline__ SequenceSums<typename TRules::Sums> sum_sequences(const TRules& rules, std::int64_t begin,
                                                                                           std::int64_t end) {
  SequenceSums<typename TRules::Sums> all;
  for (std::int64_t i = begin; i < min_of(end, rules.shape().batch); ++i) {
    const Sequence lengths = rules.lengths().unreported(i);
    all.clamped = all.clamped || lengths.clamped;
    all.sums = all.sums.plus(rules.sum_sequence(schedule::work_of(lengths)));
  }
  return all;
}

}  // namespace lean::cuda

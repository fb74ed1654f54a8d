// CtaShared: what the warps of a CTA share beside the ring of tiles and the exchange area.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel_config.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kRecords = 2;  // segments the producer may be ahead

/// One segment as the producer announces it to the other warps.
struct SegmentRecord {
  std::int64_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_block = 0;
  std::int32_t rows = 0;
  Sequence lengths;
  std::int32_t token_begin = 0;  // tokens [begin, end) of the sequence, in whole tiles but for the last
  std::int32_t token_end = 0;
  // Known when the barrier sharing_known has been passed.
  std::int32_t contributor = 0;
  std::int32_t contributors = 1;
  schedule::SlotMap slots;
  bool last = false;  // nothing more: no segment

  [[nodiscard]] __device__ bool sole() const { return contributors == 1; }
};

/// The work line, the plan and their sums while they are built.
struct CtaLine {
  schedule::LineSums strip_rows[DeviceLine::kStrips / kWarpThreads];
  schedule::Plan plan;
  DeviceLine line;  // begun by one thread, built by all
};

/// Likewise of a flat line, whose plan every thread keeps for itself.
struct CtaFlatLine {
  schedule::BasicLineSums<std::int32_t> warp_sums[kWarpThreads];
  schedule::SequencePlace<std::int32_t> start;  // of the strip that holds the worker's share
};

template <KernelConfig kConfig>
struct CtaShared {
  alignas(16) std::uint64_t stage_full[kMaxStages];
  std::uint64_t stage_free[kMaxStages];
  std::uint64_t record_full[kRecords];
  std::uint64_t record_free[kRecords];
  std::uint64_t sharing_known[kRecords];
  SegmentRecord records[kRecords];
  float warp_max[kConfig.token_warps()][kConfig.q_rows];
  float warp_sum[kConfig.token_warps()][kConfig.q_rows];
  float row_max[kConfig.q_rows];
  float row_sum[kConfig.q_rows];
  float row_scale[kConfig.q_rows];
  std::int32_t arrived_last;
  union {
    CtaLine line;
    CtaFlatLine flat_line;
  };
};

/// Bytes of the area through which warps exchange accumulators, a part of the dims at a time.
inline constexpr std::int32_t kExchangeBytes = 32 * 1024;

}  // namespace lean::cuda

// Boxes of a tile, by tensor copies (TMA), into columns of a stage.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/page_copies.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/tensor_map.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// Has a box copied, for the L2 to keep or not.
template <KernelConfig kConfig, bool kEndToEnd>
__device__ __forceinline__ void copy_box(const Asked<kConfig, kEndToEnd>& asked, std::byte* to, const TensorMap& map,
                                         const ptx::TensorPlace& from, std::uint64_t* full) {
  if (asked.reads_once()) {
    ptx::tensor_copy_once(to, &map, from, full);
  } else {
    ptx::tensor_copy(to, &map, from, full);
  }
}

/// Copies tokens of a tile, whole low boxes of them, by tensor copies: tall boxes as far as they go, then low ones; by all
/// producers, a lane a box. A page outside the pool comes as zeros.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_boxes(const DeviceCall& call, const BoxMaps& maps, const SegmentRecord& record,
                                           const PageRuns runs) {
  if (threadIdx.x == kConfig.consumer_threads()) {
    const std::int32_t columns = runs.keys ? kConfig.columns() : kConfig.value_columns();
    ptx::barrier_expect(runs.full, static_cast<std::uint32_t>(runs.tokens * columns * kConfig.column_bytes()));
  }
  const LaneBox<kConfig> box;
  if (kConfig.few_values() && !runs.keys && box.column >= kConfig.value_columns()) return;
  const std::int32_t in_tall = call.load.box_tokens - 1;  // a power of two
  const bool pages = Asked<kConfig>(call).pages();
  const std::int32_t tall_end = pages && (runs.token & in_tall) != 0 ? 0 : runs.tokens & ~in_tall;
  const bool tall = box.row < tall_end;
  if (box.row >= runs.tokens || (tall && (box.row & in_tall) != 0)) return;
  const std::int32_t token = runs.token + box.row;
  ptx::TensorPlace place{.byte = box.column * kConfig.column_bytes(), .token = token, .head = record.kv_head, .sequence = 0};
  if (pages) {
    place.token -= page_of(call, token) * call.problem.pages.page_tokens;
    place.sequence = runs.page_id;
    if (!in_pool(call.problem.pages, runs.page_id)) report_lacking_page(call, cta_memory<kConfig>().shared);
  } else if (call.problem.cu_kv_tokens != nullptr) {
    place.token += static_cast<std::int32_t>(record.lengths.kv_first_token);
  } else {
    place.sequence = static_cast<std::int32_t>(record.sequence);
  }
  std::byte* const to =
      runs.stage + static_cast<std::uint32_t>(box.column) * column_stage_bytes<kConfig> + box.row * kConfig.column_bytes();
  copy_box(Asked<kConfig>(call), to, tall ? maps.tall : maps.low, place, runs.full);
}

}  // namespace lean::cuda

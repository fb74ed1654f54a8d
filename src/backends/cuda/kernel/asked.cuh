// Asked: what a call asks for, as a variant's code sees it. What the variant's scope leaves out is a constant here, so that neither
// its code nor its registers are there.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// kEndToEnd: K and V without pages or cumulative lengths, which the caller knows.
template <KernelConfig kConfig, bool kEndToEnd = false>
struct Asked {
  static constexpr bool kAnyCall = kConfig.any_call();

  const DeviceCall& call;

  __device__ __forceinline__ explicit Asked(const DeviceCall& asked_call) : call(asked_call) {}

  [[nodiscard]] __device__ __forceinline__ bool flat() const { return kConfig.step() || call.plan.flat; }
  [[nodiscard]] __device__ __forceinline__ bool merge_only() const { return kAnyCall && call.fixup.pass == Pass::kMergeOnly; }
  [[nodiscard]] __device__ __forceinline__ bool last_arriver() const { return !kAnyCall || call.fixup.kind == Fixup::kLastArriver; }
  [[nodiscard]] __device__ __forceinline__ bool chunks() const {
    return kAnyCall ? call.plan.chunk_tiles > 0 : kConfig.chunks_only();
  }
  /// A window may begin inside a tile.
  [[nodiscard]] __device__ __forceinline__ bool windowed_chunks() const { return kAnyCall && chunks(); }
  /// Bulk copies bring rows end to end; tensor copies are others.
  [[nodiscard]] __device__ __forceinline__ bool bulk_copies() const {
    return kAnyCall ? call.load.bulk_copies : kConfig.copies_runs();
  }
  [[nodiscard]] __device__ __forceinline__ bool tensor_copies() const {
    return kConfig.in_columns() && !kConfig.converts() && call.load.box_tokens > 0;
  }
  /// One row block alone reads K and V: what has been read the L2 may let go of. It does not, then, of the kernel's instructions.
  [[nodiscard]] __device__ __forceinline__ bool reads_once() const {
    if constexpr (!kConfig.may_read_once()) return false;
    return kConfig.reads_once() || call.shape.group * call.problem.q_tokens <= kConfig.q_rows;
  }
  [[nodiscard]] __device__ __forceinline__ bool pages() const { return !kEndToEnd && is_paged(call.problem.pages); }
  [[nodiscard]] __device__ __forceinline__ bool cumulative_keys() const {
    return !kEndToEnd && call.problem.cu_kv_tokens != nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ bool cumulative_queries() const {
    return !kEndToEnd && call.problem.cu_q_tokens != nullptr;
  }
  /// Whether a tile may have rules, and whether these hide values (TileArgs).
  [[nodiscard]] __device__ __forceinline__ bool may_rule() const { return kAnyCall && call.tile.may_rule; }
  [[nodiscard]] __device__ __forceinline__ bool hides_values() const { return kAnyCall && call.tile.hides_values; }
};

}  // namespace lean::cuda

// Where rows of K and V lie in memory: of a head, or in pages. For whoever reads them: the first read, and the producer.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/device_call.hpp"
#include "problem/address.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {

/// Which of the sequence's pages holds a token.
[[nodiscard]] __device__ __forceinline__ std::int32_t page_of(const DeviceCall& call, std::int32_t token) {
  return call.load.page_shift >= 0 ? token >> call.load.page_shift : quotient(token, call.problem.pages.page_tokens);
}

/// Where the rows of a head lie: from token 0 of the sequence, or from token 0 of the pool's page 0.
struct HeadRows {
  bool keys = false;
  const std::byte* first = nullptr;
  std::int64_t token_bytes = 0;
  std::int64_t page_bytes = 0;

  /// The same, so many bytes on.
  [[nodiscard]] __device__ __forceinline__ HeadRows from(std::int64_t bytes) const {
    return {keys, first + bytes, token_bytes, page_bytes};
  }
};

template <KernelConfig kConfig, bool kEndToEnd>
[[nodiscard]] __device__ __forceinline__ HeadRows head_rows(const Asked<kConfig, kEndToEnd>& asked, bool keys,
                                                            const Sequence& lengths, HeadPosition at) {
  const KvRows& rows = keys ? asked.call.load.k_rows : asked.call.load.v_rows;
  const std::int64_t bytes =
      asked.pages() ? page_offset(rows.bytes, 0, at.head) : kv_offset(rows.bytes, lengths, at, asked.cumulative_keys());
  return {keys, rows.first + bytes, rows.bytes.token, rows.bytes.sequence};
}

/// Whether the problem's rows have a piece of the variant's: those of fewer dims end sooner, and the rest is 0.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool has_piece(const DeviceCall& call, std::int32_t piece, bool keys = true) {
  if constexpr (!kConfig.fills_rows()) return true;
  const std::int32_t dims = kConfig.wide() && !keys ? value_dim_of(call.problem) : call.problem.head_dim;
  return piece * kPieceBytes < dims * bytes_of(kConfig.dtype);
}

}  // namespace lean::cuda

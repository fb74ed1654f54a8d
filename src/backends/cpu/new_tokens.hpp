// NewTokens: the keys and values that this call appends. Each worker that sees them makes its own copy, rotated and rounded as the
// cache holds it, and attends to that; the one whose row block holds the token's own query writes it to the cache. So nobody
// reads what another worker writes. Of more rows than a row block has, and where one sequence reads what another appends,
// append_new_tokens() writes each ahead of the call instead, which then reads the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/tile_output.hpp"
#include "backends/cpu/worker.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "lean/problem.hpp"

namespace lean::cpu {

class NewTokens {
 public:
  NewTokens(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory) noexcept
      : problem_(problem), kernels_(kernels), memory_(memory) {}

  void begin(const TileOutput& output) noexcept;

  /// First new token of the sequence; its end where there is none.
  [[nodiscard]] std::int32_t first() const noexcept { return first_; }

  /// Makes the new rows of `token` in tile set `set` and, where they are this block's to write, stores them to the cache.
  struct Rows {
    const std::byte* k = nullptr;
    const std::byte* v = nullptr;
  };
  [[nodiscard]] Rows make(std::int64_t token, std::int32_t set, Rows cache) const noexcept;

  /// True for a row that make() returned: its elements lie side by side, whatever the cache's strides.
  [[nodiscard]] bool made(const std::byte* row) const noexcept;

 private:
  [[nodiscard]] bool writes(std::int64_t token) const noexcept;

  const Problem& problem_;
  const TileKernels& kernels_;
  const WorkerMemory& memory_;
  TileOutput output_;
  std::int32_t first_ = 0;
};

/// Whether a sequence has tokens of old in a page to which this call appends for another one: as where two requests with one prefix
/// come together, and the second is told that the first has it in the cache.
[[nodiscard]] bool reads_new_tokens_of_others(const Problem& problem, const Lengths& lengths) noexcept;

/// Rotates a query row and rounds it to q's type; nothing without a rotary embedding.
void rotate_query(const Problem& problem, const Sequence& lengths, std::int32_t query_token, float* row) noexcept;

}  // namespace lean::cpu

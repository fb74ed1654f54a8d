// What chunks and decode steps take where their launches run side by side: the numbers of schedule/side_by_side.hpp.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "schedule/side_by_side.hpp"

namespace lean::cuda {

/// What a row block takes one worker, in us: of many rows its products, 1.52 for 128 tokens of 128 dims and 9 beside them; of a decode
/// step its read, 0.99 for 64 KB, at which a worker reads while most others do not, and 7 beside it. Fitted by hand to calls of both on
/// an H100 (docs/notebook/chunks-prefill-append.md).
[[nodiscard]] constexpr schedule::BlockTime block_time(const KernelConfig& config) noexcept {
  if (config.wide()) return {.token = 1.52F / 128 * static_cast<float>(config.head_dim) / 128, .ends = 9.0F};
  return {.token = 0.99F / static_cast<float>(tiles_of_64_kb(config.tile(), 1024) * config.tile_tokens) * 1024, .ends = 7.0F};
}

/// Chunks by one kernel beside few rows by another, on so many workers of a GPU whose memory gives so many bytes a us (cost_model() has
/// the cuts and what is far). The chunks' launch has its first tile after some 15 us, the steps', whose CTAs begin when the chunks' have
/// read the lengths, after 12.
[[nodiscard]] constexpr schedule::SideBySide side_by_side(const KernelConfig& chunks, const KernelConfig& steps,
                                                          std::int32_t few_tokens, std::int32_t workers,
                                                          float memory_rate) noexcept {
  constexpr float kReached = 0.92F;  // of it, by reads alone
  const schedule::CostModel model = cost_model(chunks);
  const auto token_bytes = static_cast<float>(std::int64_t{2} * chunks.head_dim * bytes_of(chunks.dtype));
  return {.workers = workers,
          .few_tokens = few_tokens,
          .chunk_rows = chunks.q_rows,
          .chunks = block_time(chunks),
          .steps = block_time(steps),
          .chunk_start = 15.0F,
          .step_start = 12.0F,
          .cut = block_time(chunks).token * static_cast<float>(chunks.tile_tokens * model.cut_units / model.tile_units),
          .read = token_bytes / (kReached * memory_rate),
          .far_tokens = static_cast<float>(model.far_tiles * chunks.tile_tokens)};
}

}  // namespace lean::cuda

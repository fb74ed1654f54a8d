// WorkerMemory: the private buffers of one worker inside the call's scratch, so that a call allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "base/int_math.hpp"
#include "fixup/partial.hpp"
#include "tile/tile_config.hpp"

namespace lean::cpu {

/// A tile and the one after it, whose K is asked for while the first is computed.
inline constexpr std::int32_t kTileSets = 2;

struct WorkerMemoryLayout {
  tile::TileConfig config;             // head_dim and value_dim padded to kLaneMultiple
  std::int32_t accumulators = 1;       // partials held at once: 1, or the chunk tree's stack
  bool packs_tiles = false;            // K or V needs a contiguous fp32 copy of each tile
  const TurnedTile* turned = nullptr;  // tiles are turned, into as much room
  std::int32_t new_rows = 0;           // tokens that a call may append to one tile
  bool tables = false;                 // rows of a tile may not be evenly spaced: pages, hidden tokens

  [[nodiscard]] constexpr fixup::PartialLayout partial() const noexcept { return {config.q_rows, config.value_dim}; }
  [[nodiscard]] constexpr std::int32_t score_stride() const noexcept {
    return static_cast<std::int32_t>(round_up(config.tile_tokens + 3, kLaneMultiple));  // scores are written in fours
  }
  [[nodiscard]] constexpr std::int64_t query_floats() const noexcept { return std::int64_t{config.q_rows} * config.head_dim; }
  [[nodiscard]] constexpr std::int64_t query_bf16_floats() const noexcept { return round_up(query_floats() / 2, kLaneMultiple); }
  [[nodiscard]] constexpr std::int64_t score_floats() const noexcept { return std::int64_t{config.q_rows} * score_stride(); }
  [[nodiscard]] constexpr std::int64_t sum_floats() const noexcept { return std::int64_t{config.q_rows} * config.value_dim; }
  [[nodiscard]] constexpr std::int64_t row_floats() const noexcept { return round_up(config.q_rows, kLaneMultiple); }
  [[nodiscard]] constexpr std::int64_t partial_floats() const noexcept { return round_up(partial().floats(), kLaneMultiple); }
  [[nodiscard]] constexpr std::int64_t packed_floats(std::int32_t dims) const noexcept {
    if (turned != nullptr) return round_up(config.tile_tokens, kTurnedMultiple) * round_up(dims, kTurnedMultiple);
    return packs_tiles ? std::int64_t{config.tile_tokens} * dims : 0;
  }
  /// A new token's K, then its V, as the cache holds them.
  [[nodiscard]] constexpr std::int64_t new_k_bytes() const noexcept { return config.head_dim * bytes_of(config.kv_dtype); }
  [[nodiscard]] constexpr std::int64_t new_row_bytes() const noexcept {
    return new_k_bytes() + config.value_dim * bytes_of(config.kv_dtype);
  }
  [[nodiscard]] constexpr std::int64_t new_kv_floats() const noexcept {
    return round_up(ceil_div(new_rows * new_row_bytes(), sizeof(float)), kLaneMultiple);
  }
  [[nodiscard]] constexpr std::int64_t bias_floats() const noexcept { return tables ? score_stride() : 0; }
  /// A table of one tile's rows, in floats.
  [[nodiscard]] constexpr std::int64_t table_floats() const noexcept {
    return tables ? round_up(config.tile_tokens, kLaneMultiple) * static_cast<std::int64_t>(sizeof(void*) / sizeof(float)) : 0;
  }
  [[nodiscard]] constexpr std::int64_t flag_floats() const noexcept {
    return tables ? round_up(ceil_div(config.tile_tokens, sizeof(float)), kLaneMultiple) : 0;
  }
  /// A page more than the sum, so that two workers never share a cache line or alias in the L1.
  [[nodiscard]] constexpr std::int64_t bytes() const noexcept {
    const std::int64_t floats = query_floats() + query_bf16_floats() + score_floats() + sum_floats() + 2 * row_floats() +
                                accumulators * partial_floats() + packed_floats(config.head_dim) + packed_floats(config.value_dim) +
                                bias_floats() + kTileSets * (2 * table_floats() + flag_floats() + new_kv_floats());
    return round_up(floats * static_cast<std::int64_t>(sizeof(float)), 4096) + 256;
  }
};

/// Tables for the rows of one tile; null where layout.tables is false.
struct TileTables {
  const std::byte** k = nullptr;   // [tile_tokens]: where each row lies
  const std::byte** v = nullptr;   // [tile_tokens]
  std::uint8_t* hidden = nullptr;  // [tile_tokens]: 1 where no row of the block sees the token
};

struct WorkerMemory {
  WorkerMemoryLayout layout;
  float* query = nullptr;  // q_rows x head_dim
  std::uint16_t* query_bf16 = nullptr;
  float* scores = nullptr;          // q_rows x score_stride
  float* sums = nullptr;            // q_rows x value_dim
  float* rescale = nullptr;         // q_rows
  std::int32_t* visible = nullptr;  // q_rows
  float* partials = nullptr;
  float* packed_k = nullptr;
  float* packed_v = nullptr;
  float* bias = nullptr;  // score_stride: one row's; null where layout.tables is false
  TileTables tile_tables[kTileSets];
  std::byte* new_kv[kTileSets] = {};  // new_rows x new_row_bytes, one set behind the other; null where new_rows is 0

  WorkerMemory(const WorkerMemoryLayout& memory_layout, std::byte* base) noexcept : layout(memory_layout) {
    auto* next = reinterpret_cast<float*>(base);
    const auto take = [&next](std::int64_t floats) {
      float* taken = next;
      next += floats;
      return taken;
    };
    query = take(layout.query_floats());
    query_bf16 = reinterpret_cast<std::uint16_t*>(take(layout.query_bf16_floats()));
    scores = take(layout.score_floats());
    sums = take(layout.sum_floats());
    rescale = take(layout.row_floats());
    visible = reinterpret_cast<std::int32_t*>(take(layout.row_floats()));
    partials = take(layout.accumulators * layout.partial_floats());
    packed_k = take(layout.packed_floats(layout.config.head_dim));
    packed_v = take(layout.packed_floats(layout.config.value_dim));
    if (!layout.tables) return;
    bias = take(layout.bias_floats());
    for (TileTables& tables : tile_tables) {
      tables.k = reinterpret_cast<const std::byte**>(take(layout.table_floats()));
      tables.v = reinterpret_cast<const std::byte**>(take(layout.table_floats()));
      tables.hidden = reinterpret_cast<std::uint8_t*>(take(layout.flag_floats()));
    }
    for (std::byte*& rows : new_kv)
      rows = layout.new_rows > 0 ? reinterpret_cast<std::byte*>(take(layout.new_kv_floats())) : nullptr;
  }

  [[nodiscard]] fixup::Partial partial(std::int32_t place) const noexcept {
    return layout.partial().at(partials + place * layout.partial_floats());
  }
};

}  // namespace lean::cpu

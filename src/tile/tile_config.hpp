// TileConfig: the one value that names a variant of a backend's LeanTile. LeanAttention, "LeanTile": the smallest run of
// tokens worth giving to a worker, found by a sweep per architecture and head dimension.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"

namespace lean::tile {

struct TileConfig {
  DType q_dtype = DType::kFloat32;
  DType kv_dtype = DType::kFloat32;
  std::int32_t head_dim = 0;     // d as computed: the call's, padded to what the variant works on
  std::int32_t value_dim = 0;    // dv, the same way
  std::int32_t tile_tokens = 0;  // tokens of a LeanTile
  std::int32_t q_rows = 0;       // rows of a row block
};

inline constexpr std::int32_t kMaxRowBlock = 128;

/// The smallest row block of 16, 32, 64 or 128 that holds `rows`, so that up to 128 rows of a kv head share one read
/// of K and V and few rows are never padded far.
LEAN_HD [[nodiscard]] constexpr std::int32_t row_block_for(std::int64_t rows) noexcept {
  std::int32_t block = 16;
  while (block < kMaxRowBlock && block < rows) block *= 2;
  return block;
}

}  // namespace lean::tile

// TileConfig: the one value that names a variant of a backend's LeanTile. LeanAttention, "LeanTile": the smallest run of
// tokens worth giving to a worker, found by a sweep per architecture and head dimension.
#pragma once

#include <cstdint>

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

}  // namespace lean::tile

// TensorMap: what tensor copies (TMA, sm_90) are told of K, V or the queries. They bring boxes of some rows x a column's bytes of each,
// and swizzle the 16-byte pieces of a box so that equal pieces of 8 rows meet in no bank (kernel/load/stage_columns.cuh).
// Source: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "Tensors", swizzling modes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lean/problem.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kBoxRows = 16;       // of a low box
inline constexpr std::int32_t kMostBoxRows = 256;  // the TMA's limit

/// A CUtensorMap, for code that does not include cuda.h.
struct alignas(128) TensorMap {
  std::byte bytes[128];
};

/// Low boxes take the TMA some 110 cycles for 2 KB, tall ones a fourth of that a byte; what is left of a tile comes in low ones.
struct BoxMaps {
  TensorMap tall;
  TensorMap low;
};

struct TensorMaps {
  BoxMaps k;
  BoxMaps v;
  TensorMap q;  // of a whole row block
};

/// Whether tensor copies can take K and V where they lie: strides are multiples of 16 bytes and not negative, pages hold whole
/// boxes.
[[nodiscard]] bool takes_boxes(const Problem& problem) noexcept;

/// Rows of a tall box, a power of two: as many as divide a tile into boxes, and pages.
[[nodiscard]] std::int32_t tall_box_rows(const Problem& problem, std::int32_t tile_tokens) noexcept;

/// The rows of a row block of many rows, by one tensor copy a column: where whole groups of query heads fill it, or it is a part of one.
/// False: they do not, or the driver takes no such map. Rows beyond the tensor's end come as zeros; those of the next tokens that come
/// along are nobody's.
[[nodiscard]] bool encode_queries(const Problem& problem, std::int32_t q_rows, TensorMap& map) noexcept;

/// `column_bytes`: of a stage's columns. False: the driver has no tensor maps, or does not take these.
[[nodiscard]] bool encode(const Problem& problem, std::int32_t column_bytes, std::int32_t tall_rows, TensorMaps& maps) noexcept;

}  // namespace lean::cuda

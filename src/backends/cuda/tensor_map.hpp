// TensorMap: what tensor copies (TMA, sm_90) are told of K or V. They bring boxes of some tokens x a column's bytes of each, and
// swizzle the 16-byte pieces of a box so that equal pieces of 8 rows meet in no bank (kernel/load/stage_columns.cuh).
// Source: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "Tensors", swizzling modes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kBoxRows = 16;       // of a low box
inline constexpr std::int32_t kMostBoxRows = 256;  // the TMA's limit

/// The low boxes of a tile, `of_column` in each of its columns, dealt out over some warps, a lane a box.
struct DealtBoxes {
  std::int32_t of_column = 0;
  std::int32_t columns = 0;
  std::int32_t warps = 0;

  [[nodiscard]] LEAN_HD constexpr std::int32_t count() const noexcept { return of_column * columns; }
  [[nodiscard]] LEAN_HD constexpr std::int32_t of_warp() const noexcept { return (count() + warps - 1) / warps; }
  /// Counted column by column; below 0: the lane has none.
  [[nodiscard]] LEAN_HD constexpr std::int32_t box_of(std::int32_t warp, std::int32_t lane) const noexcept {
    const std::int32_t box = warp * of_warp() + lane;
    return lane < of_warp() && box < count() ? box : -1;
  }
};

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
};

/// Whether tensor copies can take K and V where they lie: strides are multiples of 16 bytes and not negative, pages hold whole
/// boxes.
[[nodiscard]] bool takes_boxes(const Problem& problem) noexcept;

/// Rows of a tall box: all of a tile, or as many as divide pages into boxes.
[[nodiscard]] std::int32_t tall_box_rows(const Problem& problem, std::int32_t tile_tokens) noexcept;

/// `column_bytes`: of a stage's columns. False: the driver has no tensor maps, or does not take these.
[[nodiscard]] bool encode(const Problem& problem, std::int32_t column_bytes, std::int32_t tall_rows, TensorMaps& maps) noexcept;

}  // namespace lean::cuda

// Elements: rows of a tensor in and out of fp32, by vector loads where a row is contiguous and one by one where it is not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "base/with_type.hpp"
#include "lean/problem.hpp"

namespace lean::cpu {

[[nodiscard]] inline const std::byte* element(const TensorView& tensor, std::int64_t offset_elems) noexcept {
  return static_cast<const std::byte*>(tensor.data) + offset_elems * bytes_of(tensor.dtype);
}

/// Rows are read in place when their elements lie side by side; else they are copied to fp32 first.
[[nodiscard]] inline bool in_place(const TensorView& tensor) noexcept { return tensor.strides.dim == 1; }

/// Elements of type `dtype`, side by side, = in[0..dims), rounded to nearest even.
inline void store_elements(DType dtype, const float* in, std::byte* data, std::int32_t dims) noexcept {
  with_type(dtype, [&]<typename T>(T) {
    for (std::int32_t d = 0; d < dims; ++d) reinterpret_cast<T*>(data)[d] = from_float<T>(in[d]);
  });
}

/// A row of the tensor = elements of its type that lie side by side.
inline void copy_elements(const TensorView& tensor, const std::byte* in, std::byte* data, std::int32_t dims) noexcept {
  with_type(tensor.dtype, [&]<typename T>(T) {
    for (std::int32_t d = 0; d < dims; ++d) reinterpret_cast<T*>(data)[d * tensor.strides.dim] = reinterpret_cast<const T*>(in)[d];
  });
}

/// row[0..dims) to the nearest numbers of the type.
inline void round_row(DType dtype, float* row, std::int32_t dims) noexcept {
  with_type(dtype, [&]<typename T>(T) {
    for (std::int32_t d = 0; d < dims; ++d) row[d] = to_float(from_float<T>(row[d]));
  });
}

/// out[0..dims) = the row of the tensor that begins at `data`.
inline void load_row(const TileKernels& kernels, const TensorView& tensor, const std::byte* data, float* out,
                     std::int32_t dims) noexcept {
  const std::int64_t stride = tensor.strides.dim;
  if (in_place(tensor)) return kernels.load_row[table_index(tensor.dtype)](data, out, dims);
  with_type(tensor.dtype, [&]<typename T>(T) {
    for (std::int32_t d = 0; d < dims; ++d) out[d] = to_float(reinterpret_cast<const T*>(data)[d * stride]);
  });
}

/// The row that begins at `offset` = in[0..dims) x scale; 0 where scale is 0, whatever `in` holds.
inline void store_row(const TileKernels& kernels, const OutputView& tensor, std::int64_t offset, const float* in, float scale,
                      std::int32_t dims) noexcept {
  std::byte* data = static_cast<std::byte*>(tensor.data) + offset * bytes_of(tensor.dtype);
  const std::int64_t stride = tensor.strides.dim;
  if (stride == 1) return kernels.store_row[table_index(tensor.dtype)](in, scale, data, dims);
  with_type(tensor.dtype, [&]<typename T>(T) {
    auto* const values = reinterpret_cast<T*>(data);
    for (std::int32_t d = 0; d < dims; ++d) values[d * stride] = from_float<T>(scale == 0.0F ? 0.0F : in[d] * scale);
  });
}

}  // namespace lean::cpu

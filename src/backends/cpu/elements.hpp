// Elements: rows of a tensor in and out of fp32, by vector loads where a row is contiguous and one by one where it is not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "base/float_types.hpp"
#include "lean/problem.hpp"

namespace lean::cpu {

[[nodiscard]] inline const std::byte* element(const TensorView& tensor, std::int64_t offset_elems) noexcept {
  return static_cast<const std::byte*>(tensor.data) + offset_elems * bytes_of(tensor.dtype);
}

/// Rows are read in place when their elements lie side by side; else they are copied to fp32 first.
[[nodiscard]] inline bool in_place(const TensorView& tensor) noexcept { return tensor.strides.dim == 1; }

namespace detail {

template <typename T>
void load_strided(const std::byte* data, std::int64_t stride, float* out, std::int32_t dims) noexcept {
  const auto* values = reinterpret_cast<const T*>(data);
  for (std::int32_t d = 0; d < dims; ++d) out[d] = to_float(values[d * stride]);
}

template <typename T>
void store_strided(const float* in, float scale, std::byte* data, std::int64_t stride, std::int32_t dims) noexcept {
  auto* values = reinterpret_cast<T*>(data);
  for (std::int32_t d = 0; d < dims; ++d) values[d * stride] = from_float<T>(scale == 0.0F ? 0.0F : in[d] * scale);
}

}  // namespace detail

/// out[0..dims) = the row of the tensor that begins at `data`.
inline void load_row(const TileKernels& kernels, const TensorView& tensor, const std::byte* data, float* out,
                     std::int32_t dims) noexcept {
  const std::int64_t stride = tensor.strides.dim;
  if (in_place(tensor)) return kernels.load_row[table_index(tensor.dtype)](data, out, dims);
  switch (tensor.dtype) {
    case DType::kFloat16: return detail::load_strided<Half>(data, stride, out, dims);
    case DType::kBFloat16: return detail::load_strided<BFloat16>(data, stride, out, dims);
    case DType::kFloat8E4M3: return detail::load_strided<Float8E4M3>(data, stride, out, dims);
    case DType::kFloat8E5M2: return detail::load_strided<Float8E5M2>(data, stride, out, dims);
    default: return detail::load_strided<float>(data, stride, out, dims);
  }
}

/// The row that begins at `offset` = in[0..dims) x scale; 0 where scale is 0, whatever `in` holds.
inline void store_row(const TileKernels& kernels, const OutputView& tensor, std::int64_t offset, const float* in, float scale,
                      std::int32_t dims) noexcept {
  std::byte* data = static_cast<std::byte*>(tensor.data) + offset * bytes_of(tensor.dtype);
  const std::int64_t stride = tensor.strides.dim;
  if (stride == 1) return kernels.store_row[table_index(tensor.dtype)](in, scale, data, dims);
  switch (tensor.dtype) {
    case DType::kFloat16: return detail::store_strided<Half>(in, scale, data, stride, dims);
    case DType::kBFloat16: return detail::store_strided<BFloat16>(in, scale, data, stride, dims);
    default: return detail::store_strided<float>(in, scale, data, stride, dims);
  }
}

}  // namespace lean::cpu

// KvType: what the element type of K and V means to kernels that read it, beside what lean/dtypes.hpp says of it to everybody. Device
// code asks at run time, so names are not here; tests/unit/dtypes_test.cpp compares both.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean {

struct KvType {
  DType dtype = DType::kFloat32;
  std::int32_t bytes = 0;           // of an element
  bool scaled = false;              // values count times k_scales and v_scales, and queries are of another type
  DType product = DType::kFloat32;  // of the factors of a GPU's matrix products

  /// Elements become another type on their way to a product.
  [[nodiscard]] LEAN_HD constexpr bool converted() const noexcept { return product != dtype; }
};

[[nodiscard]] LEAN_HD constexpr KvType kv_type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return {.dtype = dtype, .bytes = 4, .product = DType::kFloat32};
    case DType::kFloat16: return {.dtype = dtype, .bytes = 2, .product = DType::kFloat16};
    case DType::kBFloat16: return {.dtype = dtype, .bytes = 2, .product = DType::kBFloat16};
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return {.dtype = dtype, .bytes = 1, .scaled = true, .product = DType::kFloat16};  // fp16 holds each
  }
  return {.dtype = dtype};
}

/// Whose kernels on a GPU read a type of K and V: both of fp8 share one family, which asks at run time which it is.
[[nodiscard]] constexpr DType kernels_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16: break;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return DType::kFloat8E4M3;
  }
  return dtype;
}

}  // namespace lean

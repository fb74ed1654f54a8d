// KvType: what the element type of K and V means to the kernels that read it, beside what lean/dtypes.hpp says to everybody.
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
  DType kernels = DType::kFloat32;  // whose kernels on a GPU read it too, and ask at run time which it is

  /// Elements become another type on their way to a product.
  [[nodiscard]] LEAN_HD constexpr bool converted() const noexcept { return product != dtype; }
};

/// Device code asks it at run time, so it holds none of the list's names; tests/unit/dtypes_test.cpp compares both.
[[nodiscard]] LEAN_HD constexpr KvType kv_type_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return {.dtype = dtype, .bytes = 4, .product = dtype, .kernels = dtype};
    case DType::kFloat16:
    case DType::kBFloat16: return {.dtype = dtype, .bytes = 2, .product = dtype, .kernels = dtype};
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:  // fp16 holds each
      return {.dtype = dtype, .bytes = 1, .scaled = true, .product = DType::kFloat16, .kernels = DType::kFloat8E4M3};
  }
  return {.dtype = dtype};
}

}  // namespace lean

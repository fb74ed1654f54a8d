// Reading and writing single elements of any float type, slow and plain: for the oracle, the error bound and tests.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/float_types.hpp"
#include "lean/problem.hpp"

namespace lean::reference {

/// out[i] = element (offset + i x stride), i in [0, count).
inline void load_run(const void* data, DType dtype, std::int64_t offset, std::int64_t stride, std::int64_t count, double* out) {
  const auto copy = [=](const auto* typed) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(to_float(typed[offset + i * stride]));
  };
  switch (dtype) {
    case DType::kFloat32: return copy(static_cast<const float*>(data));
    case DType::kFloat16: return copy(static_cast<const Half*>(data));
    case DType::kBFloat16: return copy(static_cast<const BFloat16*>(data));
    case DType::kFloat8E4M3: return copy(static_cast<const Float8E4M3*>(data));
    case DType::kFloat8E5M2: return copy(static_cast<const Float8E5M2*>(data));
  }
}

[[nodiscard]] inline double load_element(const void* data, DType dtype, std::int64_t offset) {
  double value = std::nan("");
  load_run(data, dtype, offset, 0, 1, &value);
  return value;
}

inline void store_element(void* data, DType dtype, std::int64_t offset, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(data)[offset] = narrow; break;
    case DType::kFloat16: static_cast<Half*>(data)[offset] = from_float<Half>(narrow); break;
    case DType::kBFloat16: static_cast<BFloat16*>(data)[offset] = from_float<BFloat16>(narrow); break;
    case DType::kFloat8E4M3: static_cast<Float8E4M3*>(data)[offset] = from_float<Float8E4M3>(narrow); break;
    case DType::kFloat8E5M2: static_cast<Float8E5M2*>(data)[offset] = from_float<Float8E5M2>(narrow); break;
  }
}

}  // namespace lean::reference

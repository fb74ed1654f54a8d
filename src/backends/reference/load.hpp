// Reading and writing single elements of any float type, slow and plain: for the oracle, the error bound and tests.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/with_type.hpp"
#include "lean/problem.hpp"

namespace lean::reference {

/// out[i] = element (offset + i x stride), i in [0, count).
inline void load_run(const void* data, DType dtype, std::int64_t offset, std::int64_t stride, std::int64_t count, double* out) {
  with_type(dtype, [=]<typename T>(T) {
    const auto* const typed = static_cast<const T*>(data);
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(to_float(typed[offset + i * stride]));
  });
}

[[nodiscard]] inline double load_element(const void* data, DType dtype, std::int64_t offset) {
  double value = std::nan("");
  load_run(data, dtype, offset, 0, 1, &value);
  return value;
}

inline void store_element(void* data, DType dtype, std::int64_t offset, double value) {
  with_type(dtype, [=]<typename T>(T) { static_cast<T*>(data)[offset] = from_float<T>(static_cast<float>(value)); });
}

}  // namespace lean::reference

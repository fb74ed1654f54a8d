// with_type(): from the number of an element type to the C++ type that stores it. A switch over types that no number but the
// storage decides goes through it, and a further type is one line here.
#pragma once

#include "lean/dtypes.hpp"
#include "lean/float_types.hpp"

namespace lean {

/// The storage of one type: `type`.
template <DType kType>
struct StorageOf;
template <>
struct StorageOf<DType::kFloat32> {
  using type = float;
};
template <>
struct StorageOf<DType::kFloat16> {
  using type = Half;
};
template <>
struct StorageOf<DType::kBFloat16> {
  using type = BFloat16;
};
template <>
struct StorageOf<DType::kFloat8E4M3> {
  using type = Float8E4M3;
};
template <>
struct StorageOf<DType::kFloat8E5M2> {
  using type = Float8E5M2;
};

namespace detail {

/// Tries the numbers [kNumber, kEnd) in turn.
template <std::int32_t kNumber, std::int32_t kEnd, typename TUse>
constexpr void with_numbers(DType dtype, TUse& use) {
  if constexpr (kNumber < kEnd) {
    constexpr auto kType = static_cast<DType>(kNumber);
    if (dtype == kType) return static_cast<void>(use.template operator()<kType>());
    with_numbers<kNumber + 1, kEnd>(dtype, use);
  }
}

}  // namespace detail

/// Calls use.operator()<kType>() with the type as a constant; nothing for a value outside the enumeration.
template <typename TUse>
constexpr void with_dtype(DType dtype, TUse use) {
  detail::with_numbers<0, kDTypeCount>(dtype, use);
}

/// The same for types of queries and results; nothing for any other.
template <typename TUse>
constexpr void with_query_dtype(DType dtype, TUse use) {
  detail::with_numbers<0, kQueryDTypeCount>(dtype, use);
}

/// Calls use(T{}) with the storage type T of `dtype`; nothing for a value outside the enumeration.
template <typename TUse>
constexpr void with_type(DType dtype, TUse use) {
  with_dtype(dtype, [&use]<DType kType>() { use(typename StorageOf<kType>::type{}); });
}

/// The same for types of queries and results; nothing for any other.
template <typename TUse>
constexpr void with_query_type(DType dtype, TUse use) {
  with_query_dtype(dtype, [&use]<DType kType>() { use(typename StorageOf<kType>::type{}); });
}

}  // namespace lean

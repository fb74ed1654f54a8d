// The element types as one list: what each is called, how many bytes it has and where it may stand. Names, parsers, the tables of
// backends and of bindings, and tests go through this list, so that a further type is a row here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lean/problem.hpp"

namespace lean {

/// What is known of an element type.
struct DTypeTraits {
  const char* name = "";        // as PyTorch and NumPy (with ml_dtypes) have it: "float8_e4m3fn"; "" for no type
  const char* short_name = "";  // as the command has it: "fp8_e4m3"
  std::int32_t bytes = 0;       // of an element
  bool scaled = false;          // of K and V alone: values count times k_scales and v_scales, and queries are of another type

  /// Of queries, results and additive masks too.
  [[nodiscard]] constexpr bool of_queries() const noexcept { return bytes > 0 && !scaled; }
};

/// Names are empty and bytes 0 for a value outside the enumeration.
[[nodiscard]] constexpr DTypeTraits traits_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return {.name = "float32", .short_name = "fp32", .bytes = 4};
    case DType::kFloat16: return {.name = "float16", .short_name = "fp16", .bytes = 2};
    case DType::kBFloat16: return {.name = "bfloat16", .short_name = "bf16", .bytes = 2};
    case DType::kFloat8E4M3: return {.name = "float8_e4m3fn", .short_name = "fp8_e4m3", .bytes = 1, .scaled = true};
    case DType::kFloat8E5M2: return {.name = "float8_e5m2", .short_name = "fp8_e5m2", .bytes = 1, .scaled = true};
  }
  return {};
}

namespace detail {
/// How many numbers have a type, from 0 on.
[[nodiscard]] constexpr std::int32_t count_dtypes() noexcept {
  std::int32_t count = 0;
  while (traits_of(static_cast<DType>(count)).bytes > 0) ++count;
  return count;
}

/// Those of queries stand before those of K and V alone, so that tables of results are the shorter part of tables of K and V.
[[nodiscard]] constexpr std::int32_t count_query_dtypes() noexcept {
  std::int32_t count = 0;
  while (traits_of(static_cast<DType>(count)).of_queries()) ++count;
  return count;
}

/// `kCount` values of the enumeration, from `kFirst` on.
template <std::int32_t kFirst, std::int32_t kCount>
[[nodiscard]] constexpr std::array<DType, static_cast<std::size_t>(kCount)> dtypes_from() noexcept {
  std::array<DType, static_cast<std::size_t>(kCount)> list{};
  for (std::int32_t i = 0; i < kCount; ++i) list[static_cast<std::size_t>(i)] = static_cast<DType>(kFirst + i);
  return list;
}

}  // namespace detail
/// How many types there are, and how many of them may be queries'.
inline constexpr std::int32_t kDTypeCount = detail::count_dtypes();
inline constexpr std::int32_t kQueryDTypeCount = detail::count_query_dtypes();

/// Every type, in the order of its number; those of queries and results, which come first; those of K and V alone.
inline constexpr auto kAllDTypes = detail::dtypes_from<0, kDTypeCount>();
inline constexpr auto kQueryDTypes = detail::dtypes_from<0, kQueryDTypeCount>();
inline constexpr auto kScaledDTypes = detail::dtypes_from<kQueryDTypeCount, kDTypeCount - kQueryDTypeCount>();

}  // namespace lean

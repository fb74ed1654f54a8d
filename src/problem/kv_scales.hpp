// Scales of fp8 K/V: value = stored x scale, one for the tensor or one for each kv head. K's goes into the scale of the scores, V's
// into the factor that ends a row: neither costs anything per element.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean {

namespace detail {
LEAN_HD [[nodiscard]] constexpr float scale_of(const float* scales, bool per_head, std::int32_t kv_head) noexcept {
  return scales == nullptr ? 1.0F : scales[per_head ? kv_head : 0];
}
}  // namespace detail

LEAN_HD [[nodiscard]] constexpr float k_scale_of(const Problem& problem, std::int32_t kv_head) noexcept {
  return detail::scale_of(problem.k_scales, problem.scales_per_head, kv_head);
}
LEAN_HD [[nodiscard]] constexpr float v_scale_of(const Problem& problem, std::int32_t kv_head) noexcept {
  return detail::scale_of(problem.v_scales, problem.scales_per_head, kv_head);
}

}  // namespace lean

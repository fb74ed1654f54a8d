// merge_states(): two finished results over disjoint keys become one (cascade attention, context parallelism).
#include <cmath>

#include "base/float_types.hpp"
#include "base/message.hpp"
#include "lean/lean.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"

namespace lean {
namespace {

/// The lse of a row without keys is -inf here and in most libraries, +inf in FlashAttention's.
float known_lse(float lse) noexcept { return std::isinf(lse) ? softmax::kNegInf : lse; }

/// A finished row is the state (lse, 1) with O already divided by l. What an empty row's O holds is not looked at.
softmax::State state_of(float lse) noexcept {
  return lse == softmax::kNegInf ? softmax::State::empty() : softmax::State{softmax::to_log2(lse), 1.0F};
}
template <typename T>
float element_of(softmax::State state, T element) noexcept {
  return state.l == 0.0F ? 0.0F : to_float(element);
}

template <typename T>
void merge_rows(T* o_a, float* lse_a, const T* o_b, const float* lse_b, std::int64_t rows, std::int32_t value_dim) noexcept {
  for (std::int64_t row = 0; row < rows; ++row) {
    const float log_a = known_lse(lse_a[row]);
    const float log_b = known_lse(lse_b[row]);
    const softmax::State a = state_of(log_a);
    const softmax::State b = state_of(log_b);
    const softmax::MergeStep step = softmax::merge_step(a, b);
    const float scale = softmax::output_scale(step.merged);
    for (std::int64_t d = row * value_dim; d < (row + 1) * value_dim; ++d) {
      o_a[d] = from_float<T>(scale * softmax::merge_element(step, element_of(a, o_a[d]), element_of(b, o_b[d])));
    }
    lse_a[row] = softmax::log_add(log_a, log_b);
  }
}

}  // namespace

Status merge_states(void* o_a, float* lse_a, const void* o_b, const float* lse_b, std::int64_t rows, std::int32_t value_dim,
                    DType dtype) noexcept {
  if (rows < 0) return refuse(StatusCode::kInvalidArgument, "rows", rows, "allowed 0 or more");
  if (value_dim < 1) return refuse(StatusCode::kInvalidArgument, "value_dim", value_dim, "allowed 1 or more");
  const char* const names[] = {"o_a", "lse_a", "o_b", "lse_b"};
  const void* const pointers[] = {o_a, lse_a, o_b, lse_b};
  for (int i = 0; i < 4 && rows > 0; ++i) {
    if (pointers[i] == nullptr) return refuse(StatusCode::kInvalidArgument, names[i], 0, "must not be null");
  }
  const auto merge = [&]<typename T>(T) {
    merge_rows(static_cast<T*>(o_a), lse_a, static_cast<const T*>(o_b), lse_b, rows, value_dim);
    return Status{};
  };
  switch (dtype) {
    case DType::kFloat32: return merge(float{});
    case DType::kFloat16: return merge(Half{});
    case DType::kBFloat16: return merge(BFloat16{});
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: break;
  }
  return refuse(StatusCode::kInvalidArgument, "dtype", static_cast<std::int64_t>(dtype), "allowed float32, float16, bfloat16");
}

}  // namespace lean

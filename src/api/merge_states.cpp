// merge_states(): two finished results over disjoint keys become one (cascade attention, context parallelism).
#include <cmath>

#include "base/message.hpp"
#include "lean/lean.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"

namespace lean {

Status merge_states(float* o_a, float* lse_a, const float* o_b, const float* lse_b, std::int64_t rows,
                    std::int32_t value_dim) noexcept {
  if (rows < 0) return refuse(StatusCode::kInvalidArgument, "rows", rows, "allowed 0 or more");
  if (value_dim < 1) return refuse(StatusCode::kInvalidArgument, "value_dim", value_dim, "allowed 1 or more");
  const char* const names[] = {"o_a", "lse_a", "o_b", "lse_b"};
  const void* const pointers[] = {o_a, lse_a, o_b, lse_b};
  for (int i = 0; i < 4 && rows > 0; ++i) {
    if (pointers[i] == nullptr) return refuse(StatusCode::kInvalidArgument, names[i], 0, "must not be null");
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    // A finished row is the state (lse, 1) with O already divided by l.
    const auto state_of = [](float lse) { return softmax::State{lse * softmax::kLog2E, lse == softmax::kNegInf ? 0.0F : 1.0F}; };
    const softmax::MergeStep step = softmax::merge_step(state_of(lse_a[row]), state_of(lse_b[row]));
    const softmax::Finished finished = softmax::finalize(step.merged);
    for (std::int32_t d = 0; d < value_dim; ++d) {
      float& a = o_a[row * value_dim + d];
      a = finished.scale * softmax::merge_element(step, a, o_b[row * value_dim + d]);
    }
    lse_a[row] = finished.lse;
  }
  return {};
}

}  // namespace lean

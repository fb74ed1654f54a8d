// merge_states() on the CPU, in every output type.
#include "backends/cpu/cpu_backend.hpp"
#include "base/float_types.hpp"

namespace lean::cpu {
namespace {

template <typename T>
void merge_rows(const softmax::FinishedStates& states) noexcept {
  T* const o_a = static_cast<T*>(states.o_a);
  const T* const o_b = static_cast<const T*>(states.o_b);
  for (std::int64_t row = 0; row < states.rows; ++row) {
    const softmax::FinishedMerge merge(states.lse_a[row], states.lse_b[row]);
    for (std::int64_t i = row * states.value_dim; i < (row + 1) * states.value_dim; ++i) {
      o_a[i] = from_float<T>(merge.element(to_float(o_a[i]), to_float(o_b[i])));
    }
    states.lse_a[row] = merge.lse();
  }
}

}  // namespace

Status merge_states(const softmax::FinishedStates& states, const Options&) noexcept {
  switch (states.dtype) {
    case DType::kFloat32: merge_rows<float>(states); break;
    case DType::kFloat16: merge_rows<Half>(states); break;
    case DType::kBFloat16: merge_rows<BFloat16>(states); break;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: break;  // refused before
  }
  return {};
}

}  // namespace lean::cpu

// merge_states() on the CPU, in every output type.
#include "backends/cpu/cpu_backend.hpp"
#include "base/with_type.hpp"

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
  with_query_type(states.dtype, [&]<typename T>(T) { merge_rows<T>(states); });  // others are refused before
  return {};
}

}  // namespace lean::cpu

// merge_states(): two finished results over disjoint keys become one (cascade attention, context parallelism). What it was given is
// checked here; a backend computes.
#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "lean/dtypes.hpp"
#include "lean/lean.hpp"
#include "softmax/finished_states.hpp"

namespace lean {
namespace {

/// What is written must not be what another row, or another thread, still reads.
Status refuse_overlaps(const softmax::FinishedStates& states) noexcept {
  const std::int64_t lse_bytes = states.rows * bytes_of(DType::kFloat32);
  const std::int64_t o_bytes = states.rows * states.value_dim * bytes_of(states.dtype);
  const struct {
    const char* name;
    const void* data;
    std::int64_t bytes;
  } arrays[] = {{"o_a", states.o_a, o_bytes},
                {"lse_a", states.lse_a, lse_bytes},
                {"o_b", states.o_b, o_bytes},
                {"lse_b", states.lse_b, lse_bytes}};
  for (int written = 0; written < 2; ++written) {
    for (int other = written + 1; other < 4; ++other) {
      if (!overlap(arrays[written].data, arrays[written].bytes, arrays[other].data, arrays[other].bytes)) continue;
      return refuse(StatusCode::kInvalidArgument, arrays[other].name, reinterpret_cast<std::intptr_t>(arrays[other].data),
                    written == 0 ? "must not overlap o_a, which is written" : "must not overlap lse_a, which is written");
    }
  }
  return {};
}

Status refuse_states(const softmax::FinishedStates& states) noexcept {
  if (states.rows < 0) return refuse(StatusCode::kInvalidArgument, "rows", states.rows, "allowed 0 or more");
  if (states.value_dim < 1) return refuse(StatusCode::kInvalidArgument, "value_dim", states.value_dim, "allowed 1 or more");
  const char* const names[] = {"o_a", "lse_a", "o_b", "lse_b"};
  const void* const pointers[] = {states.o_a, states.lse_a, states.o_b, states.lse_b};
  for (int i = 0; i < 4 && states.rows > 0; ++i) {
    if (pointers[i] == nullptr) return refuse(StatusCode::kInvalidArgument, names[i], 0, "must not be null");
  }
  if (!traits_of(states.dtype).of_queries()) {
    return refuse(StatusCode::kInvalidArgument, "dtype", static_cast<std::int64_t>(states.dtype),
                  "allowed float32, float16, bfloat16");
  }
  for (int i = 0; i < 4 && states.rows > 0; ++i) {
    const bool is_lse = i % 2 == 1;
    if (aligned_to(pointers[i], bytes_of(is_lse ? DType::kFloat32 : states.dtype))) continue;
    return refuse(StatusCode::kInvalidArgument, names[i], reinterpret_cast<std::intptr_t>(pointers[i]),
                  "must be aligned to its element size");
  }
  if (checked_product(states.rows, std::int64_t{states.value_dim} * bytes_of(DType::kFloat32)) < 0)
    return refuse(StatusCode::kInvalidArgument, "rows", states.rows, "every byte offset must fit 63 bits");
  return refuse_overlaps(states);
}

}  // namespace

Status merge_states(void* o_a, float* lse_a, const void* o_b, const float* lse_b, std::int64_t rows, std::int32_t value_dim,
                    DType dtype, const Options& options) noexcept {
  const softmax::FinishedStates states{
      .o_a = o_a, .lse_a = lse_a, .o_b = o_b, .lse_b = lse_b, .rows = rows, .value_dim = value_dim, .dtype = dtype};
  if (const Status status = refuse_states(states); !status.ok()) return status;
  if (const Status status = option_preconditions().check(options); !status.ok()) return status;
  const BackendEntry* backend = nullptr;
  if (const Status status = find_backend(options, backend); !status.ok()) return status;
  return rows == 0 ? Status{} : backend->merge_states(states, options);
}

}  // namespace lean

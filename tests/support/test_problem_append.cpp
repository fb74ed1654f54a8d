// TestProblem's new tokens: the tensors a call appends from, and what the cache must hold afterwards, byte by byte. Before the call
// the cache holds what unseen memory holds where the new tokens go.
#include <algorithm>
#include <cmath>

#include "backends/reference/appended.hpp"
#include "backends/reference/visibility.hpp"
#include "problem/append.hpp"
#include "problem/sequence.hpp"
#include "support/test_problem.hpp"

namespace lean::support {
namespace {

std::vector<std::byte> contents(const GuardedBuffer& buffer) { return {buffer.bytes().begin(), buffer.bytes().end()}; }

/// Equal bit for bit, but one NaN is as good as another.
bool same_numbers(const GuardedBuffer& found, const std::vector<std::byte>& expected, DType dtype) {
  const std::int64_t bytes = bytes_of(dtype);
  for (std::int64_t e = 0; e * bytes < static_cast<std::int64_t>(expected.size()); ++e) {
    if (std::equal(found.data() + e * bytes, found.data() + (e + 1) * bytes, expected.begin() + e * bytes)) continue;
    if (!std::isnan(reference::load_element(found.data(), dtype, e))) return false;
    if (!std::isnan(reference::load_element(expected.data(), dtype, e))) return false;
  }
  return true;
}

}  // namespace

void TestProblem::make_append() {
  const std::string name = q_packed_ ? without_batch(case_.append_layout) : case_.append_layout;
  const auto make = [&](TensorView& view, GuardedBuffer& buffer, std::int64_t dims) {
    const Layout layout = layout_of(
        name, {q_packed_ ? 1 : problem_.batch, case_.kv_heads, q_packed_ ? problem_.total_q_tokens : problem_.q_tokens, dims});
    const std::int64_t element_bytes = bytes_of(case_.dtype);
    buffer = GuardedBuffer(static_cast<std::size_t>(layout.elements * element_bytes), case_.guard,
                           static_cast<std::size_t>(layout.offset_elements * element_bytes));
    if (case_.fill == Fill::kZero) buffer.fill(std::byte{0});  // a new token that no row sees is not filled in
    view = {.data = buffer.data() + layout.data_element * element_bytes, .dtype = case_.dtype, .strides = layout.strides};
  };
  make(problem_.append.k, append_k_, case_.head_dim);
  make(problem_.append.v, append_v_, case_.value_dim != 0 ? case_.value_dim : case_.head_dim);
  if (case_.rotary_dim > 0) make_rotary();
}

void TestProblem::make_rotary() {
  const std::int64_t half = case_.rotary_dim / 2;
  problem_.append.rotary_dim = case_.rotary_dim;
  problem_.append.rotary_interleaved = case_.rotary_interleaved;
  problem_.append.rotary_absolute = case_.rotary_absolute;
  rotary_cos_ = GuardedBuffer(static_cast<std::size_t>(problem_.kv_capacity * half) * sizeof(float), case_.guard);
  rotary_sin_ = GuardedBuffer(rotary_cos_.size_bytes(), case_.guard);
  for (std::int64_t position = 0; position < problem_.kv_capacity; ++position) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
      rotary_cos_.as<float>()[position * half + i] = static_cast<float>(std::cos(angle));
      rotary_sin_.as<float>()[position * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  problem_.append.rotary_cos = rotary_cos_.as<float>();
  problem_.append.rotary_sin = rotary_sin_.as<float>();
}

void TestProblem::expect_appended() {
  k_cache_.before = contents(k_);
  v_cache_.before = contents(v_);
  const LengthSource lengths(problem_);
  const auto append = [&](const TensorView& cache, std::int64_t b, std::int32_t head, std::int64_t token, reference::NewRow which) {
    const Sequence sequence = lengths(b);
    auto offset = reference::token_offset(problem_, cache.strides, sequence, {b, head}, token);
    if (!offset) return;
    for (const double x : reference::appended_row(problem_, sequence, {b, head}, token, which)) {
      reference::store_element(const_cast<void*>(cache.data), cache.dtype, *offset, x);
      *offset += cache.strides.dim;
    }
  };
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    for (std::int32_t head = 0; head < case_.kv_heads; ++head) {
      for (std::int64_t token = first_new_token(problem_, lengths(b)); token < lengths(b).kv_end; ++token) {
        append(problem_.k, b, head, token, reference::NewRow::kKey);
        append(problem_.v, b, head, token, reference::NewRow::kValue);
      }
    }
  }
  k_cache_.after = contents(k_);
  v_cache_.after = contents(v_);
  restore_cache();
}

void TestProblem::restore_cache() const {
  std::ranges::copy(k_cache_.before, k_.data());
  std::ranges::copy(v_cache_.before, v_.data());
}

bool TestProblem::appended_as_expected() const {
  return !case_.append ||
         (same_numbers(k_, k_cache_.after, problem_.k.dtype) && same_numbers(v_, v_cache_.after, problem_.v.dtype));
}

}  // namespace lean::support

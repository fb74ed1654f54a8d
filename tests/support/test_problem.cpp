#include "support/test_problem.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "backends/reference/load.hpp"
#include "backends/reference/visibility.hpp"
#include "lean/dtypes.hpp"
#include "problem/address.hpp"
#include "problem/append.hpp"
#include "problem/sequence.hpp"
#include "support/inputs.hpp"
#include "support/random.hpp"

namespace lean::support {
namespace {

using reference::load_element;
using reference::store_element;

template <typename T>
GuardedBuffer make_array(const std::vector<T>& values, Guard guard) {
  GuardedBuffer buffer(values.size() * sizeof(T), guard);
  std::memcpy(buffer.data(), values.data(), buffer.size_bytes());
  return buffer;
}

std::vector<std::int32_t> running_sum(const std::vector<std::int32_t>& values) {
  std::vector<std::int32_t> sums{0};
  for (const std::int32_t value : values) sums.push_back(sums.back() + value);
  return sums;
}

GuardedBuffer make_tensor(const Layout& layout, DType dtype, Guard guard) {
  const auto element = static_cast<std::size_t>(bytes_of(dtype));
  return GuardedBuffer(static_cast<std::size_t>(layout.elements) * element, guard,
                       static_cast<std::size_t>(layout.offset_elements) * element);
}

void fill_with(const GuardedBuffer& buffer, DType dtype, Fill fill) {
  if (fill == Fill::kNan) return buffer.fill(kPoison);
  if (fill == Fill::kZero) return buffer.fill(std::byte{0});
  if (dtype == DType::kFloat8E4M3) return buffer.fill(std::byte{0x7F});  // no infinity: NaN
  if (dtype == DType::kFloat8E5M2) return buffer.fill(std::byte{0x7C});  // stores saturate
  const auto elements = static_cast<std::int64_t>(buffer.size_bytes()) / bytes_of(dtype);
  for (std::int64_t i = 0; i < elements; ++i) store_element(buffer.data(), dtype, i, std::numeric_limits<double>::infinity());
}

DType kv_dtype_of(const Case& c) {
  if (c.kv_type == KvType::kAsQueries) return c.dtype;
  return kScaledDTypes[static_cast<std::size_t>(c.kv_type) - 1];
}

void* data_of(const GuardedBuffer& buffer, const Layout& layout, DType dtype) {
  return buffer.data() + layout.data_element * bytes_of(dtype);
}

bool is_poison(const std::byte* element, std::int64_t bytes) {
  return std::all_of(element, element + bytes, [](std::byte b) { return b == kPoison; });
}

}  // namespace

TestProblem::TestProblem(const Case& description, Contents contents) : case_(description) {
  problem_.batch = case_.batch();
  problem_.q_heads = case_.q_heads;
  problem_.kv_heads = case_.kv_heads;
  problem_.head_dim = case_.head_dim;
  problem_.value_dim = case_.value_dim;
  problem_.scores.scale = case_.scale;
  problem_.scores.causal = case_.causal;
  q_packed_ = is_packed(case_.q_layout);
  kv_packed_ = is_packed(case_.k_layout) && case_.page_tokens == 0;
  if (case_.page_tokens > 0 && is_packed(case_.k_layout)) throw std::invalid_argument("pages need a k layout with b");
  make_length_arrays();
  if (case_.page_tokens > 0) make_pages();
  lay_out();
  if (case_.kv_scales != KvScales::kNone) make_kv_scales();
  make_score_arrays();
  if (case_.append) make_append();
  if (contents == Contents::kData) fill_inputs();
  remember();
  poison_outputs();
}

std::int32_t TestProblem::n_q_of(std::int64_t sequence) const {
  return case_.n_q[q_packed_ ? static_cast<std::size_t>(sequence) % case_.n_q.size() : 0];
}

std::int64_t TestProblem::identity_of(std::int64_t sequence) const {
  return case_.ids.empty() ? sequence : case_.ids[static_cast<std::size_t>(sequence)];
}

void TestProblem::make_length_arrays() {
  const std::int32_t longest = case_.lens.empty() ? 0 : *std::max_element(case_.lens.begin(), case_.lens.end());
  const bool fixed_length = !case_.lengths && !kv_packed_;
  if (fixed_length) case_.lens.assign(case_.lens.size(), std::max(longest, case_.capacity));
  if (kv_packed_) {
    std::vector<std::int32_t> spans = case_.lens;
    for (std::int32_t& span : spans) span += case_.capacity;
    cu_kv_tokens_ = make_array(running_sum(spans), case_.guard);
    problem_.cu_kv_tokens = cu_kv_tokens();
    problem_.total_kv_tokens = std::accumulate(spans.begin(), spans.end(), std::int64_t{0});
    problem_.kv_capacity = longest + case_.capacity;
  } else {
    problem_.kv_capacity = std::max(longest, case_.capacity);
  }
  if (!fixed_length && (!kv_packed_ || case_.capacity > 0)) {
    kv_lengths_ = make_array(case_.lens, case_.guard);
    problem_.kv_lengths = kv_lengths();
  }
  if (!case_.pad.empty()) {
    kv_left_pad_ = make_array(case_.pad, case_.guard);
    problem_.kv_left_pad = kv_left_pad();
  }
  problem_.q_tokens = std::max(1, *std::max_element(case_.n_q.begin(), case_.n_q.end()));
  if (!q_packed_) {
    problem_.q_tokens = case_.n_q[0];
    return;
  }
  std::vector<std::int32_t> n_q;
  for (std::int64_t b = 0; b < problem_.batch; ++b) n_q.push_back(n_q_of(b));
  cu_q_tokens_ = make_array(running_sum(n_q), case_.guard);
  problem_.cu_q_tokens = cu_q_tokens();
  problem_.total_q_tokens = std::accumulate(n_q.begin(), n_q.end(), std::int64_t{0});
}

void TestProblem::make_kv_scales() {
  problem_.scales_per_head = case_.kv_scales == KvScales::kHead;
  const auto numbers = [this](std::int64_t which) {
    std::vector<float> values(problem_.scales_per_head ? static_cast<std::size_t>(case_.kv_heads) : 1U);
    for (std::size_t h = 0; h < values.size(); ++h) {
      values[h] =
          static_cast<float>(0.25 + uniform(key_of({static_cast<std::int64_t>(case_.seed), which, static_cast<std::int64_t>(h)})));
    }
    return make_array(values, case_.guard);
  };
  k_scales_ = numbers(40);
  v_scales_ = numbers(41);
  problem_.k_scales = k_scales_.as<float>();
  problem_.v_scales = v_scales_.as<float>();
}

Layout TestProblem::layout_of(const std::string& name, Extents extents) const {
  const auto layout = make_layout(name, extents);
  if (!layout) throw std::invalid_argument("not a layout: " + name);
  return *layout;
}

void TestProblem::lay_out() {
  const std::int64_t dv = case_.value_dim != 0 ? case_.value_dim : case_.head_dim;
  const Extents queries{q_packed_ ? 1 : problem_.batch, case_.q_heads, q_packed_ ? problem_.total_q_tokens : problem_.q_tokens, 0};
  const Extents keys = case_.page_tokens > 0 ? Extents{problem_.pages.page_count, case_.kv_heads, case_.page_tokens, 0}
                                             : Extents{kv_packed_ ? 1 : problem_.batch, case_.kv_heads,
                                                       kv_packed_ ? problem_.total_kv_tokens : problem_.kv_capacity, 0};
  const auto with_dims = [](Extents extents, std::int64_t dims) {
    extents.dims = dims;
    return extents;
  };
  const auto input = [this](TensorView& view, GuardedBuffer& buffer, DType dtype, const std::string& name, Extents extents) {
    const Layout layout = layout_of(name, extents);
    buffer = make_tensor(layout, dtype, case_.guard);
    fill_with(buffer, dtype, case_.fill);
    view = {.data = data_of(buffer, layout, dtype), .dtype = dtype, .strides = layout.strides};
  };
  const DType kv_dtype = kv_dtype_of(case_);
  input(problem_.q, q_, case_.dtype, case_.q_layout, with_dims(queries, case_.head_dim));
  input(problem_.k, k_, kv_dtype, case_.k_layout, with_dims(keys, case_.head_dim));
  if (case_.values_in_keys) {
    if (dv > case_.head_dim || case_.append) throw std::invalid_argument("values in keys are some of their dims, and not appended");
    problem_.v = problem_.k;
  } else {
    input(problem_.v, v_, kv_dtype, kv_packed_ ? without_batch(case_.v_layout) : case_.v_layout, with_dims(keys, dv));
  }
  if (problem_.kv_capacity == 0) problem_.k.data = problem_.v.data = nullptr;

  o_layout_ = layout_of(q_packed_ ? without_batch(case_.o_layout) : case_.o_layout, with_dims(queries, dv));
  o_ = make_tensor(o_layout_, case_.dtype, Guard::kCanary);
  problem_.o = {.data = data_of(o_, o_layout_, case_.dtype), .dtype = case_.dtype, .strides = o_layout_.strides};
  if (!case_.lse) return;
  lse_layout_ = layout_of(q_packed_ ? without_batch(case_.lse_layout) : case_.lse_layout, with_dims(queries, 1));
  lse_ = make_tensor(lse_layout_, DType::kFloat32, Guard::kCanary);
  problem_.lse = {.data = static_cast<float*>(data_of(lse_, lse_layout_, DType::kFloat32)),
                  .sequence_stride = lse_layout_.strides.sequence,
                  .head_stride = lse_layout_.strides.head,
                  .token_stride = lse_layout_.strides.token};
}

void TestProblem::fill_inputs() {
  const InputPattern pattern(case_);
  std::vector<double> row;
  const auto store = [&row](const TensorView& view, std::int64_t offset) {
    for (const double x : row) {
      store_element(const_cast<void*>(view.data), view.dtype, offset, x);
      offset += view.strides.dim;
    }
  };
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const std::int64_t id = identity_of(b);
    const std::int32_t n_q = n_q_of(b);
    for (std::int32_t h = 0; h < case_.q_heads; ++h) {
      for (std::int32_t t = 0; t < n_q; ++t) {
        row.resize(static_cast<std::size_t>(case_.head_dim));
        pattern.q_row(id, h, n_q - 1 - t, row);
        store(problem_.q, q_offset_of(problem_.q.strides, {b, h, t, 0}));
      }
    }
    const std::int32_t begin = case_.pad.empty() ? 0 : case_.pad[static_cast<std::size_t>(b)];
    for (std::int32_t h = 0; h < case_.kv_heads; ++h) {
      for (std::int32_t t = begin; t < case_.lens[static_cast<std::size_t>(b)]; ++t) {
        if (!seen_by_some_row(b, h, t)) continue;  // stays what unseen memory holds
        row.resize(static_cast<std::size_t>(case_.head_dim));
        pattern.k_row(id, h, t, row);
        const bool is_new = t >= first_new_token(problem_, LengthSource(problem_)(b));
        const auto place = [&](const TensorView& cache, const TensorView& appended) {
          if (!is_new) return store(cache, kv_offset_of(cache.strides, {b, h, t, 0}));
          store(appended, append_offset(problem_, appended.strides, LengthSource(problem_)(b), {b, h}, t));
        };
        place(problem_.k, problem_.append.k);
        if (case_.values_in_keys) continue;
        row.resize(static_cast<std::size_t>(case_.value_dim != 0 ? case_.value_dim : case_.head_dim));
        pattern.v_row(id, h, t, row);
        place(problem_.v, problem_.append.v);
      }
    }
  }
}

std::int64_t TestProblem::q_offset_of(const Strides& strides, At at) const {
  const Sequence lengths = LengthSource(problem_)(at.sequence);
  return q_offset(strides, lengths, {at.sequence, at.head}, q_packed_) + at.token * strides.token + at.dim * strides.dim;
}

std::int64_t TestProblem::kv_offset_of(const Strides& strides, At at) const {
  const Sequence lengths = LengthSource(problem_)(at.sequence);
  return reference::token_offset(problem_, strides, lengths, {at.sequence, at.head}, at.token).value() + at.dim * strides.dim;
}

double TestProblem::q(At at) const { return load_element(problem_.q.data, case_.dtype, q_offset_of(problem_.q.strides, at)); }
double TestProblem::k(At at) const { return load_element(problem_.k.data, problem_.k.dtype, kv_offset_of(problem_.k.strides, at)); }
double TestProblem::v(At at) const { return load_element(problem_.v.data, problem_.v.dtype, kv_offset_of(problem_.v.strides, at)); }
double TestProblem::o(At at) const { return load_element(problem_.o.data, case_.dtype, q_offset_of(problem_.o.strides, at)); }
float TestProblem::lse(At at) const {
  return problem_.lse.data[q_offset_of(lse_layout_.strides, {at.sequence, at.head, at.token, 0})];
}

namespace {
void store_input(const TensorView& view, std::int64_t offset, double value) {
  store_element(const_cast<void*>(view.data), view.dtype, offset, value);
}
}  // namespace

void TestProblem::set_q(At at, double value) { store_input(problem_.q, q_offset_of(problem_.q.strides, at), value); }
void TestProblem::set_k(At at, double value) { store_input(problem_.k, kv_offset_of(problem_.k.strides, at), value); }
void TestProblem::set_v(At at, double value) { store_input(problem_.v, kv_offset_of(problem_.v.strides, at), value); }

std::vector<const GuardedBuffer*> TestProblem::input_buffers() const {
  std::vector<const GuardedBuffer*> buffers = {
      &append_k_,   &append_v_,    &rotary_cos_,  &rotary_sin_,   &k_scales_,     &v_scales_, &page_table_, &page_indptr_, &q_,
      &kv_lengths_, &kv_left_pad_, &cu_q_tokens_, &cu_kv_tokens_, &alibi_slopes_, &sinks_,    &mask_,       &tree_mask_};
  if (!case_.append) buffers.insert(buffers.end(), {&k_, &v_});
  return buffers;
}

std::vector<std::uint64_t> TestProblem::input_checksums() const {
  std::vector<std::uint64_t> sums;
  for (const GuardedBuffer* buffer : input_buffers()) sums.push_back(buffer->checksum());
  return sums;
}

void TestProblem::remember() {
  checksums_ = input_checksums();
  if (case_.append) expect_appended();
}

void TestProblem::poison_outputs() {
  if (case_.append) restore_cache();
  o_.fill(kPoison);
  lse_.fill(kPoison);
}

bool TestProblem::outputs_untouched() const {
  const bool cache_untouched =
      !case_.append || (std::ranges::equal(k_.bytes(), k_cache_.before) && std::ranges::equal(v_.bytes(), v_cache_.before));
  return cache_untouched && o_.intact() && lse_.intact() && is_poison(o_.data(), static_cast<std::int64_t>(o_.size_bytes())) &&
         is_poison(lse_.data(), static_cast<std::int64_t>(lse_.size_bytes()));
}

std::string TestProblem::output_faults(bool of_lse) const {
  const GuardedBuffer& buffer = of_lse ? lse_ : o_;
  const Layout& layout = of_lse ? lse_layout_ : o_layout_;
  const std::int64_t bytes = of_lse ? 4 : bytes_of(case_.dtype);
  const std::int32_t dims = of_lse ? 1 : (case_.value_dim != 0 ? case_.value_dim : case_.head_dim);
  std::vector<bool> owned(static_cast<std::size_t>(layout.elements), false);
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const std::int32_t n_q = LengthSource(problem_)(b).q_tokens;
    for (std::int32_t h = 0; h < case_.q_heads; ++h) {
      for (std::int32_t t = 0; t < n_q; ++t) {
        for (std::int32_t i = 0; i < dims; ++i) {
          owned[static_cast<std::size_t>(layout.data_element + q_offset_of(layout.strides, {b, h, t, i}))] = true;
        }
      }
    }
  }
  for (std::int64_t e = 0; e < layout.elements; ++e) {
    const bool poison = is_poison(buffer.data() + e * bytes, bytes);
    if (poison == owned[static_cast<std::size_t>(e)]) {
      return std::string(of_lse ? "lse" : "o") + " buffer element " + std::to_string(e) +
             (poison ? " was not written; " : " is in a gap and was written; ");
    }
  }
  return {};
}

std::string TestProblem::memory_faults() const {
  std::string faults;
  std::vector<const GuardedBuffer*> buffers = input_buffers();
  buffers.insert(buffers.end(), {&o_, &lse_, &k_, &v_});
  for (const GuardedBuffer* buffer : buffers) {
    if (!buffer->intact()) faults += "memory beside a tensor was written; ";
  }
  if (!appended_as_expected()) faults += "the cache does not hold what was appended, or something else; ";
  if (input_checksums() != checksums_) faults += "an input was written; ";
  faults += output_faults(false);
  if (case_.lse) faults += output_faults(true);
  return faults;
}

std::vector<std::uint8_t> TestProblem::output_bits() const {
  std::vector<std::uint8_t> bits;
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const std::vector<std::uint8_t> sequence = output_bits(b);
    bits.insert(bits.end(), sequence.begin(), sequence.end());
  }
  return bits;
}

std::vector<std::uint8_t> TestProblem::output_bits(std::int64_t sequence) const {
  std::vector<std::uint8_t> bits;
  const auto append = [&bits](const void* data, std::int64_t bytes) {
    const auto* first = static_cast<const std::uint8_t*>(data);
    bits.insert(bits.end(), first, first + bytes);
  };
  const std::int64_t bytes = bytes_of(case_.dtype);
  const std::int32_t dims = case_.value_dim != 0 ? case_.value_dim : case_.head_dim;
  const std::int32_t n_q = LengthSource(problem_)(sequence).q_tokens;
  for (std::int32_t t = 0; t < n_q; ++t) {
    for (std::int32_t h = 0; h < case_.q_heads; ++h) {
      for (std::int32_t i = 0; i < dims; ++i) {
        append(static_cast<const std::byte*>(problem_.o.data) + q_offset_of(problem_.o.strides, {sequence, h, t, i}) * bytes,
               bytes);
      }
      if (case_.lse) append(problem_.lse.data + q_offset_of(lse_layout_.strides, {sequence, h, t, 0}), 4);
    }
  }
  return bits;
}

}  // namespace lean::support

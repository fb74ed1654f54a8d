// TestProblem's arrays of Scores: slopes, sinks, masks. Masks hide single keys, runs longer than a LeanTile, and all keys of some
// rows; where no key is, they hold what a careless reader would notice.
#include <cmath>
#include <limits>

#include "backends/reference/load.hpp"
#include "backends/reference/visibility.hpp"
#include "problem/sequence.hpp"
#include "support/random.hpp"
#include "support/test_problem.hpp"

namespace lean::support {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kRun = 300;  // tokens: more than the largest LeanTile

DType dtype_of(Mask mask) {
  return mask == Mask::kFloat16 ? DType::kFloat16 : (mask == Mask::kBFloat16 ? DType::kBFloat16 : DType::kFloat32);
}

/// What a mask says of a key: -inf hides it.
double mask_value(std::int64_t seed, const reference::QueryRow& row, std::int64_t key) {
  const auto token = static_cast<std::int64_t>(row.token);
  if (pick(key_of({seed, 20, row.sequence, row.head, token}), 9) == 0) return kNegInf;  // the whole row
  if (pick(key_of({seed, 21, row.sequence, key / kRun}), 4) == 0) return kNegInf;       // a run, for all rows
  const std::uint64_t own = key_of({seed, 22, row.sequence, row.head, token, key});
  if (pick(own, 5) == 0) return kNegInf;
  return 4.0 * uniform(mix(own)) - 2.0;
}

GuardedBuffer floats(std::int64_t count, Guard guard) {
  return GuardedBuffer(static_cast<std::size_t>(count) * sizeof(float), guard);
}

}  // namespace

void TestProblem::make_score_arrays() {
  Scores& scores = problem_.scores;
  scores.window_left = case_.window_left;
  scores.window_right = case_.window_right;
  scores.softcap = case_.softcap;
  if (case_.alibi) {
    const std::int64_t sequences = case_.alibi_per_sequence ? problem_.batch : 1;
    alibi_slopes_ = floats(sequences * case_.q_heads, case_.guard);
    for (std::int64_t i = 0; i < sequences * case_.q_heads; ++i) {
      alibi_slopes_.as<float>()[i] = std::exp2(-8.0F * static_cast<float>(i + 1) / static_cast<float>(case_.q_heads));
    }
    scores.alibi_slopes = alibi_slopes_.as<float>();
    scores.alibi_sequence_stride = case_.alibi_per_sequence ? case_.q_heads : 0;
  }
  if (case_.sinks) {
    sinks_ = floats(case_.q_heads, case_.guard);
    for (std::int32_t h = 0; h < case_.q_heads; ++h) {
      const std::uint64_t key = key_of({static_cast<std::int64_t>(case_.seed), 23, h});
      sinks_.as<float>()[h] = pick(key, 5) == 0 ? -INFINITY : static_cast<float>(12.0 * uniform(key) - 4.0);
    }
    scores.sinks = sinks_.as<float>();
  }
  if (case_.mask != Mask::kNone) make_mask();
  if (case_.tree) make_tree_mask();
}

void TestProblem::make_mask() {
  Scores& scores = problem_.scores;
  const Layout layout = layout_of(case_.mask_layout, {problem_.batch, case_.q_heads, problem_.q_tokens, problem_.kv_capacity});
  scores.mask_is_boolean = case_.mask == Mask::kBoolean;
  scores.mask_dtype = dtype_of(case_.mask);
  scores.mask_strides = layout.strides;
  const std::int64_t element_bytes = scores.mask_is_boolean ? 1 : bytes_of(scores.mask_dtype);
  mask_ = GuardedBuffer(static_cast<std::size_t>(layout.elements * element_bytes), case_.guard,
                        static_cast<std::size_t>(layout.offset_elements * element_bytes));
  if (case_.fill == Fill::kZero) mask_.fill(std::byte{0});
  scores.mask = mask_.data() + layout.data_element * element_bytes;
  const LengthSource lengths(problem_);
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const Sequence sequence = lengths(b);
    for (std::int32_t head = 0; head < case_.q_heads; ++head) {
      for (std::int32_t token = 0; token < sequence.q_tokens; ++token) {
        for (std::int64_t key = sequence.kv_begin; key < sequence.kv_end; ++key) {
          const double value = mask_value(static_cast<std::int64_t>(case_.seed), {b, head, token}, key);
          const std::int64_t offset = mask_offset(scores.mask_strides, {b, head}, token, key);
          auto* const data = const_cast<void*>(scores.mask);
          if (scores.mask_is_boolean) {
            static_cast<std::uint8_t*>(data)[offset] = value == kNegInf ? 0 : static_cast<std::uint8_t>(1 + key % 255);
          } else {
            reference::store_element(data, scores.mask_dtype, offset, value);
          }
        }
      }
    }
  }
}

/// Every draft token sees itself and a part of those before it.
void TestProblem::make_tree_mask() {
  const std::int64_t words = (std::int64_t{problem_.q_tokens} + 31) / 32;
  tree_mask_ =
      GuardedBuffer(static_cast<std::size_t>(problem_.batch * problem_.q_tokens * words) * sizeof(std::uint32_t), case_.guard);
  for (std::int64_t row = 0; row < problem_.batch * problem_.q_tokens; ++row) {
    const std::int64_t token = row % problem_.q_tokens;
    for (std::int64_t word = 0; word < words; ++word) {
      std::uint32_t bits = 0;
      for (std::int64_t draft = word * 32; draft < (word + 1) * 32; ++draft) {
        const bool seen =
            draft == token || (draft < token && pick(key_of({static_cast<std::int64_t>(case_.seed), 24, row, draft}), 2) == 0);
        bits |= (seen ? 1U : 0U) << (draft % 32);
      }
      tree_mask_.as<std::uint32_t>()[row * words + word] = bits;
    }
  }
  problem_.scores.tree_mask = tree_mask_.as<std::uint32_t>();
}

bool TestProblem::seen_by_some_row(std::int64_t sequence, std::int32_t kv_head, std::int64_t token) const {
  const Scores& scores = problem_.scores;
  if (scores.window_left < 0 && scores.window_right < 0 && scores.mask == nullptr && scores.tree_mask == nullptr) return true;
  const Sequence lengths = LengthSource(problem_)(sequence);
  const std::int32_t group = case_.q_heads / case_.kv_heads;
  for (std::int32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (std::int32_t query = 0; query < lengths.q_tokens; ++query) {
      if (reference::sees(problem_, lengths, {sequence, head, query}, token)) return true;
    }
  }
  return false;
}

}  // namespace lean::support

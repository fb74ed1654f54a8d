// Sequence: the lengths of one sequence as every room sees them, clamped so that nothing outside the tensors is ever
// addressed. A clamped sequence is reported once, by a sticky code; its rows hold attention over what was left.
// Called by the schedule (through LengthSource), by the address rules and by the backends' worker loops.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"

namespace lean {

struct Sequence {
  std::int32_t q_tokens = 0;        // n_q
  std::int64_t q_first_token = 0;   // cumulative query lengths: where its queries start; else 0
  std::int32_t kv_begin = 0;        // first token that counts (left padding)
  std::int32_t kv_end = 0;          // one past the last token
  std::int64_t kv_first_token = 0;  // cumulative K/V lengths: where its tokens start; else 0
  std::int64_t first_page = 0;      // pages as CSR: where its ids start in page_indices; else 0
  bool clamped = false;             // a length array held a value that cannot be

  [[nodiscard]] LEAN_HD constexpr std::int32_t kv_tokens() const noexcept { return kv_end - kv_begin; }
};

/// Where query token `token` stands among the keys of its sequence: the last one at the last key.
LEAN_HD [[nodiscard]] constexpr std::int64_t query_position(const Sequence& lengths, std::int32_t token) noexcept {
  return std::int64_t{lengths.kv_end} - lengths.q_tokens + token;
}

/// Whether any of the problem's lengths are cumulative: packed queries or tokens, page ids as CSR.
[[nodiscard]] LEAN_HD constexpr bool has_cumulative_lengths(const Problem& problem) noexcept {
  return problem.cu_q_tokens != nullptr || problem.cu_kv_tokens != nullptr ||
         (problem.pages.page_tokens > 0 && problem.pages.page_indptr != nullptr);
}

/// How a word of an array of lengths is read.
struct PlainLoad {
  [[nodiscard]] LEAN_HD static constexpr std::int32_t load(const std::int32_t* at) noexcept { return *at; }
};

/// Reads lengths from the problem's arrays, wherever they live. A value: copied to the device with the call. Without kCumulative,
/// for a problem that has no cumulative lengths, there is little code.
template <bool kCumulative, typename TLoad = PlainLoad>
class BasicLengthSource {
 public:
  LEAN_HD explicit constexpr BasicLengthSource(const Problem& problem) noexcept
      : cu_q_tokens_(problem.cu_q_tokens),
        kv_lengths_(problem.append.cached_lengths != nullptr ? problem.append.cached_lengths : problem.kv_lengths),
        kv_left_pad_(problem.kv_left_pad),
        cu_kv_tokens_(problem.cu_kv_tokens),
        page_indptr_(problem.pages.page_tokens > 0 ? problem.pages.page_indptr : nullptr),
        batch_(problem.batch),
        total_q_tokens_(problem.total_q_tokens),
        total_kv_tokens_(problem.total_kv_tokens),
        q_tokens_(problem.q_tokens),
        kv_capacity_(problem.kv_capacity),
        page_tokens_(problem.pages.page_tokens),
        adds_queries_(problem.append.cached_lengths != nullptr) {}

  /// n_q alone, which no length of keys is read for.
  [[nodiscard]] LEAN_HD constexpr std::int32_t q_tokens(std::int64_t sequence) const noexcept {
    if (!kCumulative || cu_q_tokens_ == nullptr) return q_tokens_;
    return span_of(cu_q_tokens_, sequence, total_q_tokens_, q_tokens_).tokens;
  }

  /// Tokens of K and V as the arrays have them, of a problem that gives lengths: those before the call and one for each of its
  /// queries where it counts them (Append::cached_lengths), whether kv_lengths is written yet or not.
  [[nodiscard]] LEAN_HD constexpr std::int32_t given_tokens(std::int64_t sequence, std::int32_t queries) const noexcept {
    const std::int32_t given = TLoad::load(kv_lengths_ + sequence);
    const std::int32_t added = adds_queries_ ? queries : 0;
    if (given < 0) return given;  // fewer than none stay so, and are found
    return given > INT32_MAX - added ? INT32_MAX : given + added;
  }

  [[nodiscard]] LEAN_HD constexpr Sequence operator()(std::int64_t sequence) const noexcept {
    Sequence s;
    s.q_tokens = q_tokens_;
    if (kCumulative && cu_q_tokens_ != nullptr) {
      const Span span = span_of(cu_q_tokens_, sequence, total_q_tokens_, q_tokens_);
      s.q_first_token = span.begin;
      s.q_tokens = span.tokens;
      s.clamped = s.clamped || span.clamped;
    }
    std::int32_t capacity = kv_capacity_;
    if (kCumulative && cu_kv_tokens_ != nullptr) {
      const Span span = span_of(cu_kv_tokens_, sequence, total_kv_tokens_, kv_capacity_);
      s.kv_first_token = span.begin;
      capacity = span.tokens;
      s.clamped = s.clamped || span.clamped;
    }
    if (kCumulative && page_indptr_ != nullptr) {
      const Span span = span_of(page_indptr_, sequence, TLoad::load(page_indptr_ + batch_), INT32_MAX);  // of pages
      s.first_page = span.begin;
      capacity = static_cast<std::int32_t>(min_of(capacity, std::int64_t{span.tokens} * page_tokens_));
      s.clamped = s.clamped || span.clamped;
    }
    s.kv_end = kv_lengths_ != nullptr ? clamp_length(given_tokens(sequence, s.q_tokens), capacity, s.clamped) : capacity;
    s.kv_begin = kv_left_pad_ != nullptr ? clamp_length(TLoad::load(kv_left_pad_ + sequence), s.kv_end, s.clamped) : 0;
    return s;
  }

 private:
  struct Span {
    std::int64_t begin;
    std::int32_t tokens;
    bool clamped;
  };

  /// [cumulative[i], cumulative[i + 1]) cut to [0, total) and to `longest` tokens. In 32 bits, which is all that the array holds.
  [[nodiscard]] LEAN_HD static constexpr Span span_of(const std::int32_t* cumulative, std::int64_t i, std::int64_t total,
                                                      std::int32_t longest) noexcept {
    const std::int32_t first = TLoad::load(cumulative + i);
    const std::int32_t last = TLoad::load(cumulative + i + 1);
    const auto there = static_cast<std::int32_t>(clamp_to(total, 0, INT32_MAX));
    const std::int32_t begin = min_of(max_of(first, 0), there);
    const std::int32_t end = min_of(max_of(last, begin), begin + min_of(max_of(longest, 0), there - begin));
    return {begin, end - begin, begin != first || end != last};
  }

  [[nodiscard]] LEAN_HD static constexpr std::int32_t clamp_length(std::int32_t value, std::int32_t high, bool& clamped) noexcept {
    const auto kept = static_cast<std::int32_t>(clamp_to(value, 0, high));
    clamped = clamped || kept != value;
    return kept;
  }

  const std::int32_t* cu_q_tokens_;
  const std::int32_t* kv_lengths_;
  const std::int32_t* kv_left_pad_;
  const std::int32_t* cu_kv_tokens_;
  const std::int32_t* page_indptr_;
  std::int64_t batch_;
  std::int64_t total_q_tokens_;
  std::int64_t total_kv_tokens_;
  std::int32_t q_tokens_;
  std::int32_t kv_capacity_;
  std::int32_t page_tokens_;
  bool adds_queries_;
};

using LengthSource = BasicLengthSource<true>;

}  // namespace lean

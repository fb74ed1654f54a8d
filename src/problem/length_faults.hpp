// LengthFault: the first entry of the lengths, or of the page ids, that lies outside what there is. One statement of it for a caller's
// arrays in host memory (check_lengths()) and for whoever had to clamp or skip one in a call, who keeps it in the state until the
// host asks (fixup::StateHeader). A value without pointers; the host puts it into words (length_faults.cpp).
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "problem/pages.hpp"
#include "problem/reach.hpp"
#include "problem/sequence.hpp"

namespace lean {

struct LengthFault {
  enum class Array : std::uint32_t {
    kNone,
    kCuQTokens,
    kCuKvTokens,
    kPageIndptr,
    kKvLengths,
    kKvLeftPad,
    kBlockTable,
    kPageIndices
  };
  enum class Rule : std::uint32_t {
    kMost,      // 0 to `most`
    kZero,      // a cumulative array's first entry
    kAscends,   // no smaller than the entry before
    kLongest,   // no further from the entry before than a sequence may be long
    kUnshared,  // a page that one sequence alone appends to, once
  };

  Array array = Array::kNone;  // kNone: everything is right
  Rule rule = Rule::kMost;
  std::int32_t seen = 0;
  std::int32_t page = 0;   // of the block table's row
  std::int64_t index = 0;  // of the block table its row
  std::int64_t most = 0;

  [[nodiscard]] LEAN_HD constexpr bool found() const noexcept { return array != Array::kNone; }
};

namespace detail {

/// A cumulative array: from 0 on, ascending, up to `total`, in steps of `longest` at most.
template <typename TLoad>
[[nodiscard]] LEAN_HD constexpr LengthFault fault_in_cumulative(LengthFault::Array array, const std::int32_t* cumulative,
                                                                std::int64_t batch, std::int64_t total,
                                                                std::int64_t longest) noexcept {
  using Rule = LengthFault::Rule;
  if (cumulative == nullptr) return {};
  std::int32_t before = TLoad::load(cumulative);
  if (before != 0) return {.array = array, .rule = Rule::kZero, .seen = before};
  for (std::int64_t i = 1; i <= batch; ++i) {
    const std::int32_t seen = TLoad::load(cumulative + i);
    if (seen < before) return {.array = array, .rule = Rule::kAscends, .seen = seen, .index = i};
    if (seen > total) return {.array = array, .seen = seen, .index = i, .most = total};
    if (std::int64_t{seen} - before > longest) return {.array = array, .rule = Rule::kLongest, .seen = seen, .index = i};
    before = seen;
  }
  return {};
}

/// Tokens that the sequence has room for, by cumulative arrays that are right.
template <typename TLoad>
[[nodiscard]] LEAN_HD constexpr std::int64_t room_of(const Problem& problem, std::int64_t sequence) noexcept {
  const auto step = [&](const std::int32_t* cumulative) {
    return std::int64_t{TLoad::load(cumulative + sequence + 1)} - TLoad::load(cumulative + sequence);
  };
  std::int64_t room = problem.kv_capacity;
  if (problem.cu_kv_tokens != nullptr) room = step(problem.cu_kv_tokens);
  const PagedKv& pages = problem.pages;
  if (is_paged(pages) && pages.page_indptr != nullptr) room = min_of(room, step(pages.page_indptr) * pages.page_tokens);
  return room;
}

template <typename TLoad>
[[nodiscard]] LEAN_HD constexpr LengthFault fault_in_sequence(const Problem& problem, std::int64_t sequence) noexcept {
  using Array = LengthFault::Array;
  std::int64_t length = room_of<TLoad>(problem, sequence);
  if (problem.kv_lengths != nullptr) {
    const BasicLengthSource<true, TLoad> lengths(problem);
    const std::int32_t seen = lengths.given_tokens(sequence, lengths.q_tokens(sequence));
    if (seen < 0 || seen > length) return {.array = Array::kKvLengths, .seen = seen, .index = sequence, .most = length};
    length = seen;
  }
  if (problem.kv_left_pad != nullptr) {
    const std::int32_t seen = TLoad::load(problem.kv_left_pad + sequence);
    if (seen < 0 || seen > length) return {.array = Array::kKvLeftPad, .seen = seen, .index = sequence, .most = length};
  }
  return {};
}

}  // namespace detail

/// The first length that is clamped, array by array where they are cumulative, then sequence by sequence.
template <typename TLoad = PlainLoad>
[[nodiscard]] LEAN_HD constexpr LengthFault first_bad_length(const Problem& problem) noexcept {
  using Array = LengthFault::Array;
  LengthFault fault = detail::fault_in_cumulative<TLoad>(Array::kCuQTokens, problem.cu_q_tokens, problem.batch,
                                                         problem.total_q_tokens, problem.q_tokens);
  if (fault.found()) return fault;
  fault = detail::fault_in_cumulative<TLoad>(Array::kCuKvTokens, problem.cu_kv_tokens, problem.batch, problem.total_kv_tokens,
                                             problem.kv_capacity);
  if (fault.found()) return fault;
  const std::int32_t* const indptr = is_paged(problem.pages) ? problem.pages.page_indptr : nullptr;
  fault = detail::fault_in_cumulative<TLoad>(Array::kPageIndptr, indptr, problem.batch, INT32_MAX, INT32_MAX);
  for (std::int64_t b = 0; b < problem.batch && !fault.found(); ++b) fault = detail::fault_in_sequence<TLoad>(problem, b);
  return fault;
}

/// The first of a sequence's page ids that is skipped: looked at where a call would read them, so a window's only, and of sequences
/// with queries. Lengths are clamped as a call clamps them.
template <typename TLoad = PlainLoad>
[[nodiscard]] LEAN_HD constexpr LengthFault first_bad_page(const Problem& problem, std::int64_t sequence) noexcept {
  const PagedKv& pages = problem.pages;
  const bool table = pages.block_table != nullptr;
  if (!is_paged(pages) || (!table && (pages.page_indptr == nullptr || pages.page_indices == nullptr))) return {};
  const Sequence lengths = BasicLengthSource<true, TLoad>(problem)(sequence);
  if (lengths.q_tokens == 0 || lengths.kv_tokens() == 0) return {};
  const KeySpan seen = keys_seen(reach_of(problem.scores), lengths.kv_tokens(), lengths.q_tokens, 0, lengths.q_tokens - 1);
  if (seen.end <= seen.begin) return {};
  const std::int32_t* const ids = page_ids(pages, lengths, sequence);
  const std::int32_t last = (lengths.kv_begin + seen.end - 1) / pages.page_tokens;
  for (std::int32_t page = (lengths.kv_begin + seen.begin) / pages.page_tokens; page <= last; ++page) {
    const std::int32_t id = TLoad::load(ids + page);
    if (in_pool(pages, id)) continue;
    return {.array = table ? LengthFault::Array::kBlockTable : LengthFault::Array::kPageIndices,
            .seen = id,
            .page = table ? page : 0,
            .index = table ? sequence : lengths.first_page + page,
            .most = pages.page_count - 1};
  }
  return {};
}

/// The same of all sequences.
template <typename TLoad = PlainLoad>
[[nodiscard]] LEAN_HD constexpr LengthFault first_bad_page(const Problem& problem) noexcept {
  LengthFault fault;
  for (std::int64_t b = 0; b < problem.batch && !fault.found(); ++b) fault = first_bad_page<TLoad>(problem, b);
  return fault;
}

}  // namespace lean

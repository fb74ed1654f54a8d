// LengthFaults in words, and check_lengths(): the host-side form of what a call clamps or skips, for callers whose arrays the host can
// read.
#include "problem/length_faults.hpp"

#include <algorithm>
#include <cstdint>

#include "base/alignment.hpp"
#include "base/message.hpp"
#include "lean/lean.hpp"
#include "problem/append.hpp"
#include "problem/length_fault_text.hpp"
#include "problem/page_set.hpp"

namespace lean {
namespace {

using Array = LengthFault::Array;
using Rule = LengthFault::Rule;

const char* name_of(Array array) noexcept {
  switch (array) {
    case Array::kNone: break;
    case Array::kCuQTokens: return "cu_q_tokens";
    case Array::kCuKvTokens: return "cu_kv_tokens";
    case Array::kPageIndptr: return "pages.page_indptr";
    case Array::kKvLengths: return "kv_lengths";
    case Array::kKvLeftPad: return "kv_left_pad";
    case Array::kBlockTable: return "pages.block_table";
    case Array::kPageIndices: return "pages.page_indices";
  }
  return "lengths";
}

/// What `most` is; empty where the name says it.
const char* what_most_is(Array array) noexcept {
  switch (array) {
    case Array::kCuQTokens:
    case Array::kCuKvTokens:
    case Array::kPageIndptr: return " (all tokens there are)";
    case Array::kKvLengths: return " (the tokens there is room for)";
    case Array::kKvLeftPad: return " (the sequence's length)";
    default: return "";
  }
}

/// The first page id among those in [first, first + PageSet::kPages) to which the call would append twice. Lengths and ids are right.
LengthFault first_shared_page(const Problem& problem, std::int64_t first) noexcept {
  const PagedKv& pages = problem.pages;
  const bool table = pages.block_table != nullptr;
  const LengthSource lengths_of(problem);
  PageSet written;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence lengths = lengths_of(b);
    const std::int32_t begin = first_new_token(problem, lengths);
    if (begin >= lengths.kv_end) continue;
    const std::int32_t* const ids = page_ids(pages, lengths, b);
    for (std::int32_t page = begin / pages.page_tokens; page <= (lengths.kv_end - 1) / pages.page_tokens; ++page) {
      const std::int64_t place = std::int64_t{ids[page]} - first;
      if (place < 0 || place >= PageSet::kPages || !in_pool(pages, ids[page]) || !written.add(place)) continue;
      return {.array = table ? Array::kBlockTable : Array::kPageIndices,
              .rule = Rule::kUnshared,
              .seen = ids[page],
              .page = table ? page : 0,
              .index = table ? b : lengths.first_page + page};
    }
  }
  return {};
}

/// The same of all pages.
LengthFault first_shared_page(const Problem& problem) noexcept {
  const PagedKv& pages = problem.pages;
  const bool listed = pages.block_table != nullptr || (pages.page_indptr != nullptr && pages.page_indices != nullptr);
  LengthFault fault;
  if (!appends(problem) || !is_paged(pages) || !listed) return fault;
  for (std::int64_t first = 0; first < pages.page_count && !fault.found(); first += PageSet::kPages)
    fault = first_shared_page(problem, first);
  return fault;
}

}  // namespace

bool is_page_id(const LengthFault& fault) noexcept {
  return fault.array == Array::kBlockTable || fault.array == Array::kPageIndices;
}

Status status_of(const LengthFault& fault, const char* what_was_done) noexcept {
  if (!fault.found()) return {};
  char allowed[160];
  switch (fault.rule) {
    case Rule::kZero: std::snprintf(allowed, sizeof(allowed), "must be 0%s", what_was_done); break;
    case Rule::kAscends:
      std::snprintf(allowed, sizeof(allowed), "must not be smaller than the entry before%s", what_was_done);
      break;
    case Rule::kLongest:
      std::snprintf(allowed, sizeof(allowed), "the sequence must not be longer than q_tokens or kv_capacity%s", what_was_done);
      break;
    case Rule::kUnshared:
      std::snprintf(allowed, sizeof(allowed), "this call appends to that page already: pages of new tokens must not be shared");
      break;
    case Rule::kMost:
      std::snprintf(allowed, sizeof(allowed), "allowed 0 to %" PRId64 "%s%s", fault.most, what_most_is(fault.array), what_was_done);
      break;
  }
  const StatusCode code = is_page_id(fault) ? StatusCode::kBadPageIndex : StatusCode::kBadLengths;
  if (fault.array != Array::kBlockTable) return refuse_element(code, name_of(fault.array), fault.index, fault.seen, allowed);
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s[%" PRId64 ", %" PRId32 "] = %" PRId32 ": %s", name_of(fault.array),
                fault.index, fault.page, fault.seen, allowed);
  return status;
}

Status check_lengths(const Problem& problem) noexcept {
  // What decode() refuses, lengths written over those that they are made of, is left as it is.
  const std::int64_t bytes = problem.batch * bytes_of(DType::kFloat32);
  if (!overlap(problem.kv_lengths, bytes, problem.append.cached_lengths, bytes)) count_new_tokens(problem);
  LengthFault fault = first_bad_length(problem);
  if (!fault.found()) fault = first_bad_page(problem);
  return status_of(fault.found() ? fault : first_shared_page(problem));
}

}  // namespace lean

// LengthFaults in words, and check_lengths(): the host-side form of what a call clamps or skips, for callers whose arrays the host can
// read.
#include "problem/length_faults.hpp"

#include "base/message.hpp"
#include "lean/lean.hpp"
#include "problem/append.hpp"
#include "problem/length_fault_text.hpp"

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
  count_new_tokens(problem);
  const LengthFault fault = first_bad_length(problem);
  return status_of(fault.found() ? fault : first_bad_page(problem));
}

}  // namespace lean

// check_lengths(): the host-side form of what LengthSource clamps and of the page ids that are skipped, for callers whose arrays
// the host can read. Page ids are looked at where a call would read them: a window's, of sequences with queries.
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "lean/lean.hpp"
#include "problem/pages.hpp"
#include "problem/reach.hpp"
#include "problem/sequence.hpp"

namespace lean {
namespace {

constexpr auto kBadLengths = StatusCode::kBadLengths;

/// "name[index] = seen: allowed 0 to most (what that is)".
Status refuse_above(const char* name, std::int64_t index, std::int64_t seen, std::int64_t most, const char* what) noexcept {
  char allowed[96];
  std::snprintf(allowed, sizeof(allowed), "allowed 0 to %" PRId64 " (%s)", most, what);
  return refuse_element(kBadLengths, name, index, seen, allowed);
}

Status check_cumulative(const char* name, const std::int32_t* cumulative, std::int64_t batch, std::int64_t total,
                        std::int64_t longest) noexcept {
  if (cumulative == nullptr) return {};
  if (cumulative[0] != 0) return refuse_element(kBadLengths, name, 0, cumulative[0], "must be 0");
  for (std::int64_t b = 0; b < batch; ++b) {
    if (cumulative[b + 1] < cumulative[b])
      return refuse_element(kBadLengths, name, b + 1, cumulative[b + 1], "must not be smaller than the entry before");
    if (cumulative[b + 1] > total) return refuse_above(name, b + 1, cumulative[b + 1], total, "all tokens there are");
    if (std::int64_t{cumulative[b + 1]} - cumulative[b] > longest) {
      return refuse_element(kBadLengths, name, b + 1, cumulative[b + 1],
                            "the sequence must not be longer than q_tokens or kv_capacity");
    }
  }
  return {};
}

/// The ids of one sequence's pages that hold a token which a query may see. Its lengths are right.
Status check_pages(const Problem& problem, std::int64_t sequence, const Sequence& lengths) noexcept {
  const PagedKv& pages = problem.pages;
  const bool table = pages.block_table != nullptr;
  if (!table && (pages.page_indptr == nullptr || pages.page_indices == nullptr)) return {};
  if (lengths.q_tokens == 0 || lengths.kv_tokens() == 0) return {};
  const KeySpan seen = keys_seen(reach_of(problem.scores), lengths.kv_tokens(), lengths.q_tokens, 0, lengths.q_tokens - 1);
  if (seen.end <= seen.begin) return {};
  const std::int32_t* const ids = page_ids(pages, lengths, sequence);
  const std::int32_t first = (lengths.kv_begin + seen.begin) / pages.page_tokens;
  const std::int32_t last = (lengths.kv_begin + seen.end - 1) / pages.page_tokens;
  for (std::int32_t page = first; page <= last; ++page) {
    if (in_pool(pages, ids[page])) continue;
    Status status{.code = StatusCode::kBadPageIndex};
    if (table) {
      std::snprintf(status.message, sizeof(status.message), "pages.block_table[%" PRId64 ", %d] = %d: allowed 0 to %" PRId64,
                    sequence, page, ids[page], pages.page_count - 1);
    } else {
      std::snprintf(status.message, sizeof(status.message), "pages.page_indices[%" PRId64 "] = %d: allowed 0 to %" PRId64,
                    lengths.first_page + page, ids[page], pages.page_count - 1);
    }
    return status;
  }
  return {};
}

Status check_sequence(const Problem& problem, std::int64_t b) noexcept {
  const PagedKv& pages = problem.pages;
  std::int64_t capacity =
      problem.cu_kv_tokens != nullptr ? problem.cu_kv_tokens[b + 1] - problem.cu_kv_tokens[b] : problem.kv_capacity;
  if (is_paged(pages) && pages.page_indptr != nullptr)
    capacity = min_of(capacity, (std::int64_t{pages.page_indptr[b + 1]} - pages.page_indptr[b]) * pages.page_tokens);
  const std::int64_t length = problem.kv_lengths != nullptr ? problem.kv_lengths[b] : capacity;
  if (length < 0 || length > capacity) return refuse_above("kv_lengths", b, length, capacity, "the tokens there is room for");
  const std::int64_t pad = problem.kv_left_pad != nullptr ? problem.kv_left_pad[b] : 0;
  if (pad < 0 || pad > length) return refuse_above("kv_left_pad", b, pad, length, "the sequence's length");
  return is_paged(pages) ? check_pages(problem, b, LengthSource(problem)(b)) : Status{};
}

}  // namespace

Status check_lengths(const Problem& problem) noexcept {
  Status status = check_cumulative("cu_q_tokens", problem.cu_q_tokens, problem.batch, problem.total_q_tokens, problem.q_tokens);
  if (!status.ok()) return status;
  status = check_cumulative("cu_kv_tokens", problem.cu_kv_tokens, problem.batch, problem.total_kv_tokens, problem.kv_capacity);
  if (!status.ok()) return status;
  if (is_paged(problem.pages)) {
    status = check_cumulative("pages.page_indptr", problem.pages.page_indptr, problem.batch, INT32_MAX, INT32_MAX);
    if (!status.ok()) return status;
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    status = check_sequence(problem, b);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace lean

// check_lengths(): the host-side form of what LengthSource clamps, for callers whose length arrays the host can read.
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "lean/lean.hpp"

namespace lean {
namespace {

Status check_cumulative(const char* name, const std::int32_t* cumulative, std::int64_t batch, std::int64_t total,
                        std::int64_t longest) noexcept {
  if (cumulative == nullptr) return {};
  if (cumulative[0] != 0) return refuse_element(StatusCode::kBadLengths, name, 0, cumulative[0], "must be 0");
  for (std::int64_t b = 0; b < batch; ++b) {
    if (cumulative[b + 1] < cumulative[b]) {
      return refuse_element(StatusCode::kBadLengths, name, b + 1, cumulative[b + 1], "must not be smaller than the entry before");
    }
    if (cumulative[b + 1] > total)
      return refuse_element(StatusCode::kBadLengths, name, b + 1, cumulative[b + 1], "must not exceed the total");
    if (std::int64_t{cumulative[b + 1]} - cumulative[b] > longest) {
      return refuse_element(StatusCode::kBadLengths, name, b + 1, cumulative[b + 1],
                            "the sequence must not be longer than q_tokens or kv_capacity");
    }
  }
  return {};
}

}  // namespace

Status check_lengths(const Problem& problem) noexcept {
  Status status = check_cumulative("cu_q_tokens", problem.cu_q_tokens, problem.batch, problem.total_q_tokens, problem.q_tokens);
  if (!status.ok()) return status;
  status = check_cumulative("cu_kv_tokens", problem.cu_kv_tokens, problem.batch, problem.total_kv_tokens, problem.kv_capacity);
  if (!status.ok()) return status;
  const bool csr = problem.pages.page_tokens > 0 && problem.pages.page_indptr != nullptr;
  if (csr) {
    status = check_cumulative("pages.page_indptr", problem.pages.page_indptr, problem.batch, INT32_MAX, INT32_MAX);
    if (!status.ok()) return status;
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    std::int32_t capacity =
        problem.cu_kv_tokens != nullptr ? problem.cu_kv_tokens[b + 1] - problem.cu_kv_tokens[b] : problem.kv_capacity;
    if (csr) {
      const std::int64_t pages = problem.pages.page_indptr[b + 1] - problem.pages.page_indptr[b];
      capacity = static_cast<std::int32_t>(min_of(capacity, pages * problem.pages.page_tokens));
    }
    const std::int32_t length = problem.kv_lengths != nullptr ? problem.kv_lengths[b] : capacity;
    if (length < 0 || length > capacity)
      return refuse_element(StatusCode::kBadLengths, "kv_lengths", b, length, "allowed 0 to the capacity");
    const std::int32_t pad = problem.kv_left_pad != nullptr ? problem.kv_left_pad[b] : 0;
    if (pad < 0 || pad > length) return refuse_element(StatusCode::kBadLengths, "kv_left_pad", b, pad, "allowed 0 to the length");
  }
  return {};
}

}  // namespace lean

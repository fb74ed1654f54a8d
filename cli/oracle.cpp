#include "cli/oracle.hpp"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "base/int_math.hpp"
#include "cli/gpu.hpp"
#include "cli/threads.hpp"
#include "problem/address.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "problem/sequence.hpp"

namespace lean::cli {
namespace {

const void* moved(const void* data, DType dtype, std::int64_t elements) {
  return static_cast<const std::byte*>(data) + elements * bytes_of(dtype);
}

/// Query heads [first, first + count) of one sequence; they share a kv head.
struct Heads {
  std::int64_t sequence = 0;
  std::int32_t first = 0;
  std::int32_t count = 0;
};

Problem part_of_problem(const Problem& whole, const Heads& heads) {
  const Sequence lengths = LengthSource(whole)(heads.sequence);
  const HeadPosition q{heads.sequence, heads.first};
  const HeadPosition kv{heads.sequence, heads.first / (whole.q_heads / whole.kv_heads)};
  const bool packed = whole.cu_kv_tokens != nullptr;
  Problem part = whole;
  part.batch = 1;
  part.q_heads = heads.count;
  part.kv_heads = 1;
  part.q.data = moved(whole.q.data, whole.q.dtype, q_offset(whole.q.strides, lengths, q, false));
  const bool paged = is_paged(whole.pages);
  const auto kv_start = [&](const Strides& s) { return paged ? kv.head * s.head : kv_offset(s, lengths, kv, packed); };
  part.k.data = moved(whole.k.data, whole.k.dtype, kv_start(whole.k.strides));
  part.v.data = moved(whole.v.data, whole.v.dtype, kv_start(whole.v.strides));
  if (paged) part.pages.block_table += heads.sequence * whole.pages.block_table_stride;
  if (whole.scores.alibi_slopes != nullptr) part.scores.alibi_slopes += heads.first;
  if (whole.scores.sinks != nullptr) part.scores.sinks += heads.first;
  part.o.data = const_cast<void*>(moved(whole.o.data, whole.o.dtype, q_offset(whole.o.strides, lengths, q, false)));
  part.lse.data = whole.lse.data + heads.sequence * whole.lse.sequence_stride + heads.first * whole.lse.head_stride;
  part.kv_capacity = lengths.kv_end;
  part.kv_lengths = nullptr;
  part.cu_kv_tokens = nullptr;
  part.total_kv_tokens = 0;
  return part;
}

std::int64_t products_of(const Problem& whole, const Heads& heads) {
  const std::int64_t tokens = LengthSource(whole)(heads.sequence).kv_tokens();
  return tokens * heads.count * whole.q_tokens * (whole.head_dim + value_dim_of(whole));
}

std::vector<Heads> all_heads(const Problem& problem, std::int32_t count) {
  std::vector<Heads> heads;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int32_t h = 0; h < problem.q_heads; h += count) heads.push_back({b, h, count});
  }
  return heads;
}

/// Everything where that is affordable; else single heads, in steps coprime to their number, until the budget is spent.
std::vector<Heads> choose(const Problem& problem, std::int64_t max_products) {
  std::vector<Heads> groups = all_heads(problem, problem.q_heads / problem.kv_heads);
  std::int64_t products = 0;
  for (const Heads& group : groups) products += products_of(problem, group);
  if (products <= max_products || groups.empty()) return groups;
  const std::vector<Heads> single = all_heads(problem, 1);
  const auto count = static_cast<std::int64_t>(single.size());
  std::int64_t step = count * 5 / 8 + 1;
  while (std::gcd(step, count) != 1) ++step;
  std::vector<Heads> chosen;
  std::int64_t spent = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Heads& heads = single[static_cast<std::size_t>((count - 1 + i * step) % count)];
    spent += products_of(problem, heads);
    if (!chosen.empty() && spent > max_products) break;
    chosen.push_back(heads);
  }
  return chosen;
}

}  // namespace

Oracle::Oracle(const DecodeProblem& problem, std::int64_t max_products)
    : problem_(problem), rows_(problem.spec().batch() * problem.spec().q_heads * problem.spec().q_tokens) {
  if (problem.place() == Place::kDevice) {
    answer_on_gpu();
  } else {
    answer_on_host(max_products);
  }
}

void Oracle::answer_on_gpu() {
  o_ = Buffer(problem_.o().bytes());
  lse_ = Buffer(problem_.lse().bytes());
  Problem results = problem_.shape();
  results.o.data = o_.data();
  results.lse.data = reinterpret_cast<float*>(lse_.data());
  items_.push_back({.sequence = 0, .q_head = 0, .problem = results, .answer = gpu::reference_answer(problem_.problem())});
}

void Oracle::answer_on_host(std::int64_t max_products) {
  const Problem& problem = problem_.problem();
  for (const Heads& heads : choose(problem, max_products)) {
    items_.push_back({.sequence = heads.sequence, .q_head = heads.first, .problem = part_of_problem(problem, heads), .answer = {}});
  }
  std::atomic<std::size_t> next{0};
  on_threads(thread_count(), [&](std::int32_t) {
    for (std::size_t i = next++; i < items_.size(); i = next++) items_[i].answer = reference::decode(items_[i].problem);
  });
}

Verdict Oracle::check(const reference::Rounding& rounding) const {
  if (problem_.place() == Place::kDevice) {
    copy_bytes(o_, problem_.o());
    copy_bytes(lse_, problem_.lse());
  }
  Verdict verdict{.rows = rows_};
  for (const Item& item : items_) {
    reference::ErrorReport report = reference::compare(item.problem, item.answer, rounding);
    verdict.rows_checked += item.answer.rows();
    if (report.error_ratio < verdict.error_ratio || (report.error_ratio == verdict.error_ratio && !verdict.worst.empty())) continue;
    report.worst.sequence += item.sequence;
    report.worst.head += item.q_head;
    verdict.error_ratio = report.error_ratio;
    verdict.worst = reference::describe(report);
  }
  return verdict;
}

}  // namespace lean::cli

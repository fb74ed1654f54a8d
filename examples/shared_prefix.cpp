// Many requests that share a prefix (a system prompt): its keys and values are read once for all of them, each request's own ones
// by a second call, and merge_states() makes one result of two. Beside it one call that reads the prefix for every request. Both
// work on the same pages; the prefix's stand in every request's block table.
#include <lean/lean.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kRequests = 16, kQueryHeads = 8, kKvHeads = 2, kDim = 64, kPageTokens = 64;
constexpr int kPrefixPages = 128, kOwnPages = 4, kPages = kPrefixPages + kOwnPages;  // of a request

/// One call, and the time of its best run.
class Call {
 public:
  explicit Call(const lean::Problem& problem) : problem_(problem) {
    const lean::WorkspaceSize need = lean::workspace_size(problem, {});
    if (!need.status.ok()) std::fprintf(stderr, "%s\n", need.status.message), std::exit(1);
    workspace_ = {std::aligned_alloc(lean::kWorkspaceAlignment, need.state_bytes), need.state_bytes,
                  std::aligned_alloc(lean::kWorkspaceAlignment, need.scratch_bytes), need.scratch_bytes};
    if (!lean::reset_workspace(workspace_, {}).ok()) std::exit(1);
  }
  ~Call() { std::free(workspace_.state), std::free(workspace_.scratch); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void run() const {
    const lean::Status status = lean::decode(problem_, {}, workspace_);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.message), std::exit(1);
  }

 private:
  lean::Problem problem_;
  lean::Workspace workspace_{};
};

template <typename TWork>
double best_ms(const TWork& work) {
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

int main() {
  constexpr int kPool = kPrefixPages + kRequests * kOwnPages;
  constexpr long kPageElements = long{kKvHeads} * kPageTokens * kDim;
  constexpr int kRows = kRequests * kQueryHeads;
  std::vector<float> q(kRows * kDim), k(kPool * kPageElements), v(k.size()), o(q.size()), o_own(q.size()), o_each(q.size());
  std::vector<float> lse(kRows), lse_own(kRows);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = 4 * std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i)
    k[i] = std::cos(0.37F * static_cast<float>(i % 9973)), v[i] = std::sin(static_cast<float>(i % 7919));
  std::vector<int> table(kRequests * kPages);
  for (int b = 0; b < kRequests; ++b) {
    for (int p = 0; p < kPages; ++p) table[static_cast<std::size_t>(b * kPages + p)] = p < kPrefixPages ? p : p + b * kOwnPages;
  }

  const std::vector<int> lengths(kRequests, kPages * kPageTokens), own_lengths(kRequests, kOwnPages * kPageTokens);
  const int prefix_length = kPrefixPages * kPageTokens;

  lean::Problem each{.batch = kRequests,
                     .q_heads = kQueryHeads,
                     .kv_heads = kKvHeads,
                     .head_dim = kDim,
                     .kv_capacity = kPages * kPageTokens,
                     .kv_lengths = lengths.data()};
  each.q = {.data = q.data(), .strides = {.sequence = kQueryHeads * kDim, .head = kDim}};
  each.o = {.data = o_each.data(), .strides = each.q.strides};
  each.k = {.data = k.data(), .strides = {.sequence = kPageElements, .head = kPageTokens * kDim, .token = kDim}};
  each.v = {.data = v.data(), .strides = each.k.strides};
  each.pages = {.page_tokens = kPageTokens, .page_count = kPool, .block_table = table.data(), .block_table_stride = kPages};

  lean::Problem prefix = each;  // one sequence, whose query tokens are the requests
  prefix.batch = 1;
  prefix.q_tokens = kRequests;
  prefix.kv_capacity = prefix_length;
  prefix.kv_lengths = &prefix_length;
  prefix.q.strides = {.head = kDim, .token = kQueryHeads * kDim};
  prefix.o = {.data = o.data(), .strides = prefix.q.strides};
  prefix.lse = {.data = lse.data(), .head_stride = 1, .token_stride = kQueryHeads};

  lean::Problem own = each;
  own.kv_capacity = kOwnPages * kPageTokens;
  own.kv_lengths = own_lengths.data();
  own.pages.block_table += kPrefixPages;
  own.o.data = o_own.data();
  own.lse = {.data = lse_own.data(), .sequence_stride = kQueryHeads, .head_stride = 1};

  const Call call_each(each), call_prefix(prefix), call_own(own);
  const double ms_each = best_ms([&] { call_each.run(); });
  const double ms_cascade = best_ms([&] {
    call_prefix.run();
    call_own.run();
    if (!lean::merge_states(o.data(), lse.data(), o_own.data(), lse_own.data(), kRows, kDim).ok()) std::exit(1);
  });
  float difference = 0.0F;
  for (std::size_t i = 0; i < o.size(); ++i) difference = std::max(difference, std::abs(o[i] - o_each[i]));
  std::printf("prefix read for each of %d requests: %.2f ms; once, and merged: %.2f ms; largest difference %.1e\n", kRequests,
              ms_each, ms_cascade, static_cast<double>(difference));
  return difference < 1e-4F ? 0 : 1;
}

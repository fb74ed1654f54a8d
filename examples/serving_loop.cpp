// A serving loop of one layer: requests come and go, their keys and values lie in pages of one pool, and each step is one call that
// rotates the new tokens, writes them to their pages and attends to them. The workspace is sized once, for the largest step.
#include <lean/lean.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace {

constexpr int kQueryHeads = 8, kKvHeads = 2, kDim = 64, kPageTokens = 16, kPages = 64, kMostTokens = 256, kMostRequests = 4;
constexpr int kTablePages = kMostTokens / kPageTokens;
constexpr long kPageElements = long{kPageTokens} * kKvHeads * kDim;

struct Request {
  int steps_left;
  int tokens = 0;
  std::vector<int> pages{};
};

std::vector<float> numbers(std::size_t count, float frequency) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = std::sin(frequency * static_cast<float>(i % 9973));
  return values;
}

/// Owns the memory of one call after the other.
class Workspace {
 public:
  explicit Workspace(const lean::Problem& largest) {
    const lean::WorkspaceSize need = lean::workspace_size(largest, {});
    if (!need.status.ok()) std::fprintf(stderr, "%s\n", need.status.message), std::exit(1);
    memory_ = {std::aligned_alloc(lean::kWorkspaceAlignment, need.state_bytes), need.state_bytes,
               std::aligned_alloc(lean::kWorkspaceAlignment, need.scratch_bytes), need.scratch_bytes};
    if (!lean::reset_workspace(memory_, {}).ok()) std::exit(1);
  }
  ~Workspace() { std::free(memory_.state), std::free(memory_.scratch); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void run(const lean::Problem& problem) const {
    const lean::Status status = lean::decode(problem, {}, memory_);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.message), std::exit(1);
  }

 private:
  lean::Workspace memory_{};
};

}  // namespace

int main() {
  std::vector<float> k_pool(kPages * kPageElements), v_pool(k_pool.size()), o(kMostRequests * kQueryHeads * kDim);
  const std::vector<float> q = numbers(o.size(), 0.31F), new_k = numbers(kMostRequests * kKvHeads * kDim, 0.7F), new_v = new_k;
  std::vector<float> cosines(kMostTokens * kDim / 2), sines(cosines.size());  // [positions, rotary_dim / 2]
  for (std::size_t i = 0; i < cosines.size(); ++i) {
    const double angle = static_cast<double>(i / (kDim / 2)) / std::pow(1e4, static_cast<double>(i % (kDim / 2)) / (kDim / 2));
    cosines[i] = static_cast<float>(std::cos(angle)), sines[i] = static_cast<float>(std::sin(angle));
  }
  std::vector<int> free_pages(kPages), lengths(kMostRequests), table(kMostRequests * kTablePages);
  std::iota(free_pages.begin(), free_pages.end(), 0);

  lean::Problem problem{.batch = kMostRequests,
                        .q_heads = kQueryHeads,
                        .kv_heads = kKvHeads,
                        .head_dim = kDim,
                        .kv_capacity = kMostTokens,
                        .kv_lengths = lengths.data()};
  problem.q = {.data = q.data(), .strides = {.sequence = kQueryHeads * kDim, .head = kDim}};
  problem.o = {.data = o.data(), .strides = problem.q.strides};
  problem.k = {.data = k_pool.data(), .strides = {.sequence = kPageElements, .head = kDim, .token = kKvHeads * kDim}};
  problem.v = {.data = v_pool.data(), .strides = problem.k.strides};
  problem.pages = {
      .page_tokens = kPageTokens, .page_count = kPages, .block_table = table.data(), .block_table_stride = kTablePages};
  problem.append.k = {.data = new_k.data(), .strides = {.sequence = kKvHeads * kDim, .head = kDim}};
  problem.append.v = {.data = new_v.data(), .strides = problem.append.k.strides};
  problem.append.rotary_cos = cosines.data();
  problem.append.rotary_sin = sines.data();
  problem.append.rotary_dim = kDim;
  const Workspace workspace(problem);  // does not depend on lengths, and serves smaller batches too

  std::vector<Request> waiting = {{20}, {70}, {5}, {40}, {90}, {33}}, running;
  int steps = 0;
  while (!waiting.empty() || !running.empty()) {
    if (!waiting.empty() && running.size() < kMostRequests) running.push_back(waiting.back()), waiting.pop_back();
    for (std::size_t b = 0; b < running.size(); ++b) {
      Request& request = running[b];
      if (request.tokens++ % kPageTokens == 0) request.pages.push_back(free_pages.back()), free_pages.pop_back();
      lengths[b] = request.tokens;  // counts the token that the call appends
      for (std::size_t p = 0; p < request.pages.size(); ++p) table[b * kTablePages + p] = request.pages[p];
    }
    problem.batch = static_cast<std::int64_t>(running.size());
    workspace.run(problem);
    for (std::size_t b = running.size(); b-- > 0;) {
      if (--running[b].steps_left > 0) continue;
      free_pages.insert(free_pages.end(), running[b].pages.begin(), running[b].pages.end());
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(b));
    }
    ++steps;
  }
  std::printf("%d steps, %zu of %d pages are free again, o[0] = %f\n", steps, free_pages.size(), kPages, static_cast<double>(o[0]));
  return free_pages.size() == kPages && std::isfinite(o[0]) ? 0 : 1;
}

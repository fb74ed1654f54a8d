// One decode step: 2 sequences of up to 4096 tokens, 8 query heads that share 2 key/value heads, head_dim 64.
#include <lean/lean.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
  const int kv_lengths[] = {4096, 1234};
  std::vector<float> q(2 * 8 * 64), k(2 * 2 * 4096 * 64), v(k.size()), o(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = v[i] = std::cos(static_cast<float>(i));

  lean::Problem problem{.batch = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64, .kv_capacity = 4096, .kv_lengths = kv_lengths};
  problem.q = {.data = q.data(), .strides = {.sequence = 8 * 64, .head = 64}};
  problem.k = {.data = k.data(), .strides = {.sequence = 2 * 4096 * 64, .head = 4096 * 64, .token = 64}};
  problem.v = {.data = v.data(), .strides = problem.k.strides};
  problem.o = {.data = o.data(), .strides = problem.q.strides};

  const lean::WorkspaceSize need = lean::workspace_size(problem, {});
  lean::Workspace workspace{.state_bytes = need.state_bytes, .scratch_bytes = need.scratch_bytes};
  workspace.state = std::aligned_alloc(lean::kWorkspaceAlignment, need.state_bytes);
  workspace.scratch = std::aligned_alloc(lean::kWorkspaceAlignment, need.scratch_bytes);
  if (!lean::reset_workspace(workspace, {}).ok()) return 1;

  const lean::Status status = lean::decode(problem, {}, workspace);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message), 1;
  std::printf("o[0] = %.6f\n", static_cast<double>(o[0]));
  std::free(workspace.state);
  std::free(workspace.scratch);
}

/* One decode step: 2 sequences of up to 4096 tokens, 8 query heads that share 2 key/value heads, head_dim 64. */
#include <lean/lean.h>

#include <stdio.h>
#include <stdlib.h>

static float q[2 * 8 * 64], k[2 * 2 * 4096 * 64], v[2 * 2 * 4096 * 64], o[2 * 8 * 64];

int main(void) {
  const int32_t kv_lengths[] = {4096, 1234};
  for (size_t i = 0; i < sizeof(q) / sizeof(*q); ++i) q[i] = (float)(i % 7) / 7 - 0.5f;
  for (size_t i = 0; i < sizeof(k) / sizeof(*k); ++i) k[i] = v[i] = (float)(i % 11) / 11 - 0.5f;

  lean_problem problem;
  lean_options options;
  lean_problem_init(&problem);
  lean_options_init(&options);
  problem.batch = 2, problem.q_heads = 8, problem.kv_heads = 2, problem.head_dim = 64;
  problem.kv_capacity = 4096, problem.kv_lengths = kv_lengths;
  problem.q.data = q, problem.q.sequence_stride = 8 * 64, problem.q.head_stride = 64;
  problem.k.data = k, problem.k.sequence_stride = 2 * 4096 * 64, problem.k.head_stride = 4096 * 64, problem.k.token_stride = 64;
  problem.v = problem.k, problem.v.data = v;
  problem.o = problem.q, problem.o.data = o;

  lean_workspace workspace;
  lean_status status = lean_workspace_size(&problem, &options, &workspace.state_bytes, &workspace.scratch_bytes);
  if (status.code != LEAN_OK) return fprintf(stderr, "%s\n", status.message), 1;
  workspace.state = aligned_alloc(256, workspace.state_bytes);
  workspace.scratch = aligned_alloc(256, workspace.scratch_bytes);
  lean_reset_workspace(&workspace, &options);

  status = lean_decode(&problem, &options, &workspace);
  if (status.code != LEAN_OK) return fprintf(stderr, "%s\n", status.message), 1;
  printf("o[0] = %.6f\n", (double)o[0]);
  free(workspace.state);
  free(workspace.scratch);
  return 0;
}

/* Context parallel attention in one process: the tokens of every sequence dealt out over ranks in blocks, a rank a GPU, and one decode step
 * whose launch on each GPU sends its rows to the others and merges what they send. Where there are not two GPUs that reach each other's
 * memory, or this or the library was built without CUDA, the ranks are two shards on the CPU whose results lean_merge_states() merges.
 * Both beside one call over all tokens. Ranks in processes of their own differ in one call: lean_exchange_open() with a handle. */
#include <lean/lean.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef EXAMPLE_CUDA
#include <cuda_runtime_api.h>
#endif

enum { RANKS = 2, BLOCK = 16, B = 3, Q_HEADS = 8, KV_HEADS = 2, DIM = 64, TOKENS = 1000, ROOM = 512, ROWS = B * Q_HEADS };
static const int32_t kLengths[B] = {1000, 1, 333};

static void need(lean_status status) {
  if (status.code != LEAN_OK) fprintf(stderr, "%s: %s\n", lean_status_name(status.code), status.message), exit(1);
}

/* Memory of a GPU, or of the host where `gpu` is below 0. */
#ifdef EXAMPLE_CUDA
static void need_cuda(cudaError_t error) {
  if (error != cudaSuccess) fprintf(stderr, "%s\n", cudaGetErrorString(error)), exit(1);
}
#endif
static int gpu_count(void) {
  int count = 0;
#ifdef EXAMPLE_CUDA
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
#endif
  return count;
}
static void make_current(int gpu) {
#ifdef EXAMPLE_CUDA
  if (gpu >= 0) need_cuda(cudaSetDevice(gpu));
#else
  (void)gpu;
#endif
}
static void* zeroed(int gpu, size_t bytes) {
  bytes = (bytes + 255) / 256 * 256;
  if (gpu < 0) return memset(aligned_alloc(256, bytes), 0, bytes);
  void* memory = NULL;
#ifdef EXAMPLE_CUDA
  need_cuda(cudaMalloc(&memory, bytes)), need_cuda(cudaMemset(memory, 0, bytes));
#endif
  return memory;
}
static void copy(int gpu, void* to, const void* from, size_t bytes) { /* waits for what was enqueued before */
  if (gpu < 0) memcpy(to, from, bytes);
#ifdef EXAMPLE_CUDA
  if (gpu >= 0) need_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
#endif
}
static void give_back(int gpu, void* memory) {
  if (gpu < 0) free(memory);
#ifdef EXAMPLE_CUDA
  if (gpu >= 0) need_cuda(cudaFree(memory));
#endif
}

/* Element of a tensor, bf16: a multiple of 1/64 below 1, exact. */
static uint16_t element(uint32_t tensor, uint32_t place) {
  const float number = (float)((int)(((place * 2654435761u) ^ (tensor * 40503u)) >> 13 & 127) - 64) / 64.0f;
  uint32_t bits = 0;
  memcpy(&bits, &number, sizeof(bits));
  return (uint16_t)(bits >> 16);
}
static float number_of(uint16_t element) {
  const uint32_t bits = (uint32_t)element << 16;
  float number = 0;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

/* A rank's side of the step, or, with `ranks` 1, all of it. */
typedef struct side {
  int gpu, rank, ranks;
  lean_problem problem;
  lean_options options;
  lean_workspace workspace;
  lean_exchange exchange;
  void* memory[8];
} side;

/* Which token of the sequence lies at `kept` of the rank. */
static int token_at(const side* s, int kept) { return (kept / BLOCK * s->ranks + s->rank) * BLOCK + kept % BLOCK; }

static void* put(side* s, int slot, const void* data, size_t bytes) {
  s->memory[slot] = zeroed(s->gpu, bytes);
  copy(s->gpu, s->memory[slot], data, bytes);
  return s->memory[slot];
}

static void make(side* s, int gpu, int rank, int ranks) {
  const int room = ranks == 1 ? TOKENS : ROOM;
  static uint16_t q[ROWS * DIM], kv[2][B * KV_HEADS * TOKENS * DIM];
  s->gpu = gpu, s->rank = rank, s->ranks = ranks;
  for (uint32_t i = 0; i < ROWS * DIM; ++i) q[i] = element(1, i);
  for (int head = 0; head < B * KV_HEADS; ++head) {
    for (int kept = 0; kept < room; ++kept) {
      const int token = token_at(s, kept) % TOKENS; /* past the end: never read */
      for (int d = 0; d < DIM; ++d) {
        for (uint32_t t = 0; t < 2; ++t)
          kv[t][(head * room + kept) * DIM + d] = element(2 + t, (uint32_t)((head * TOKENS + token) * DIM + d));
      }
    }
  }
  int32_t held[B];
  const lean_token_shard shard = {rank, ranks, BLOCK};
  need(lean_shard_lengths(kLengths, held, B, &shard, NULL));

  make_current(gpu);
  lean_problem* p = &s->problem;
  lean_problem_init(p), lean_options_init(&s->options), lean_exchange_init(&s->exchange);
  p->batch = B, p->q_heads = Q_HEADS, p->kv_heads = KV_HEADS, p->head_dim = DIM, p->kv_capacity = room;
  p->q.data = put(s, 0, q, sizeof(q)), p->q.sequence_stride = Q_HEADS * DIM, p->q.head_stride = DIM;
  const size_t kv_bytes = sizeof(uint16_t) * B * KV_HEADS * (size_t)room * DIM;
  p->k.data = put(s, 1, kv[0], kv_bytes);
  p->k.sequence_stride = KV_HEADS * room * DIM, p->k.head_stride = room * DIM, p->k.token_stride = DIM;
  p->q.dtype = p->k.dtype = LEAN_BFLOAT16;
  p->v = p->k, p->v.data = put(s, 2, kv[1], kv_bytes);
  p->o = p->q, p->o.data = s->memory[3] = zeroed(gpu, sizeof(q));
  p->lse = s->memory[4] = zeroed(gpu, sizeof(float) * ROWS);
  p->lse_sequence_stride = Q_HEADS, p->lse_head_stride = 1;
  p->kv_lengths = put(s, 5, held, sizeof(held));
  s->options.backend = gpu < 0 ? LEAN_CPU : LEAN_CUDA;
  lean_workspace* w = &s->workspace;
  need(lean_workspace_size(p, &s->options, &w->state_bytes, &w->scratch_bytes));
  w->state = s->memory[6] = zeroed(gpu, w->state_bytes), w->scratch = s->memory[7] = zeroed(gpu, w->scratch_bytes);
}

/* Gives the ranks each other's memory; 0 where their GPUs do not reach it. */
static int exchanges(side* sides) {
  for (int rank = 0; rank < RANKS; ++rank) {
    make_current(sides[rank].gpu);
    const size_t bytes = lean_exchange_bytes(RANKS, ROWS, DIM, LEAN_BFLOAT16);
    need(lean_exchange_create(&sides[rank].exchange, rank, RANKS, bytes, NULL));
  }
  for (int rank = 0; rank < RANKS; ++rank) {
    const lean_status status = lean_exchange_join(&sides[rank].exchange, &sides[1 - rank].exchange);
    if (status.code == LEAN_UNSUPPORTED) return 0;
    need(status);
    sides[rank].options.exchange = &sides[rank].exchange;
  }
  return 1;
}

static void step(side* s) {
  make_current(s->gpu);
  need(lean_decode(&s->problem, &s->options, &s->workspace));
}

static void unmake(side* s) {
  for (int slot = 0; slot < 8; ++slot) give_back(s->gpu, s->memory[slot]);
  need(lean_exchange_close(&s->exchange));
}

int main(void) {
  static side sides[RANKS], whole;
  lean_options on_gpus;
  lean_options_init(&on_gpus), on_gpus.backend = LEAN_CUDA;
  const lean_token_shard all = {0, 1, BLOCK};
  int gpus = gpu_count() >= RANKS && lean_shard_lengths(NULL, NULL, 0, &all, &on_gpus).code == LEAN_OK; /* the library has CUDA */
  for (int rank = 0; rank < RANKS; ++rank) make(&sides[rank], gpus ? rank : -1, rank, RANKS);
  if (gpus && !exchanges(sides)) {
    for (int rank = 0; rank < RANKS; ++rank) unmake(&sides[rank]), make(&sides[rank], -1, rank, RANKS);
    gpus = 0;
  }
  make(&whole, sides[0].gpu, 0, 1);
  for (int rank = 0; rank < RANKS; ++rank) step(&sides[rank]);
  step(&whole);

  static uint16_t o[ROWS * DIM], expected[ROWS * DIM];
  const side *a = &sides[0], *b = &sides[1];
  if (!gpus) need(lean_merge_states(a->memory[3], a->problem.lse, b->memory[3], b->problem.lse, ROWS, DIM, LEAN_BFLOAT16, NULL));
  make_current(whole.gpu), copy(whole.gpu, expected, whole.memory[3], sizeof(expected));
  float largest = 0;
  for (int rank = 0; rank < (gpus ? RANKS : 1); ++rank) {
    make_current(sides[rank].gpu), copy(sides[rank].gpu, o, sides[rank].memory[3], sizeof(o));
    if (gpus) need(lean_exchange_status(&sides[rank].exchange));
    for (int i = 0; i < ROWS * DIM; ++i) largest = fmaxf(largest, fabsf(number_of(o[i]) - number_of(expected[i])));
  }
  printf("%d tokens on %d %s: largest difference to one call %.6f\n", TOKENS, RANKS, gpus ? "GPUs" : "shards of a CPU",
         (double)largest);
  for (int rank = 0; rank < RANKS; ++rank) unmake(&sides[rank]);
  unmake(&whole);
  return largest <= 0.01f ? 0 : 1; /* roundings to bf16 of numbers below 1 */
}

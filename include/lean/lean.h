/* lean-attention's C interface. Same calls as lean.hpp, stable across releases of one major version.
 *
 *   lean_problem problem;  lean_problem_init(&problem);   ... fill in ...
 *   lean_options options;  lean_options_init(&options);
 *   lean_status status = lean_decode(&problem, &options, &workspace);
 *
 * Structs begin with struct_size, set by their _init function. Later releases add fields at the end only; a library
 * takes smaller structs of older headers (missing fields have their defaults) and larger ones whose extra fields are 0.
 * Letters: B sequences, Hq query heads, Hkv key/value heads, n_q and n_kv tokens, d head_dim, dv value_dim.
 * Meanings, units and errors of every field and call are documented in problem.hpp, options.hpp, exchange.hpp and lean.hpp. */
#ifndef LEAN_LEAN_H_
#define LEAN_LEAN_H_

#include <stddef.h>
#include <stdint.h>

#include "lean/export.hpp"

#ifdef __cplusplus
extern "C" {
#endif

/* The type of a tensor's elements. fp8 is for K and V only. */
typedef enum lean_dtype {
  LEAN_FLOAT32 = 0,
  LEAN_FLOAT16 = 1,
  LEAN_BFLOAT16 = 2,
  LEAN_FLOAT8_E4M3 = 3,
  LEAN_FLOAT8_E5M2 = 4
} lean_dtype;

/* Where a call runs; LEAN_CUDA needs a library built with CUDA and takes the current device. */
typedef enum lean_backend { LEAN_CPU = 0, LEAN_CUDA = 1 } lean_backend;

/* How work is dealt out over the workers: lean::Policy. */
typedef enum lean_policy {
  LEAN_POLICY_LEAN = 0,
  LEAN_POLICY_FIXED_SPLIT = 1,
  LEAN_POLICY_DATA_PARALLEL = 2,
  LEAN_POLICY_FIXED_CHUNK = 3
} lean_policy;

/* Who turns the partials of a shared output into one: lean::Fixup. */
typedef enum lean_fixup { LEAN_LAST_ARRIVER = 0, LEAN_TWO_KERNELS = 1, LEAN_HOST_BLOCK = 2 } lean_fixup;

/* What of a result's bits is promised: lean::Determinism. */
typedef enum lean_determinism { LEAN_RUN_TO_RUN = 0, LEAN_BATCH_INVARIANT = 1, LEAN_NOT_GUARANTEED = 2 } lean_determinism;

/* What lean_explain_schedule() writes. */
typedef enum lean_schedule_format { LEAN_SCHEDULE_TEXT = 0, LEAN_SCHEDULE_JSON = 1, LEAN_SCHEDULE_SVG = 2 } lean_schedule_format;

/* Why a call was refused, or what it met: lean::StatusCode. */
typedef enum lean_status_code {
  LEAN_OK = 0,
  LEAN_INVALID_ARGUMENT = 1,
  LEAN_UNSUPPORTED = 2,
  LEAN_TOO_LARGE = 3,
  LEAN_WORKSPACE_TOO_SMALL = 4,
  LEAN_WORKSPACE_MISALIGNED = 5,
  LEAN_WORKSPACE_DIRTY = 6,
  LEAN_WORKSPACE_IN_USE = 7,
  LEAN_BAD_LENGTHS = 8,
  LEAN_BAD_PAGE_INDEX = 9,
  LEAN_BACKEND_ERROR = 10
} lean_status_code;

/* What every call returns. `message`, zero-terminated and empty when all is well, names the argument, the value seen and those allowed. */
typedef struct lean_status {
  int32_t code; /* a lean_status_code */
  char message[240];
} lean_status;

/* A tensor: element (sequence, head, token, dim) lies at data + the sum of index x stride. Strides in elements; with pages the
 * sequence stride is that from one page to the next. */
typedef struct lean_tensor {
  void* data;
  int32_t dtype; /* a lean_dtype */
  int32_t reserved;
  int64_t sequence_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;
} lean_tensor;

/* What a call computes: lean::Problem, field by field. lean_problem_init() gives every field its default. */
typedef struct lean_problem {
  size_t struct_size;
  int64_t batch;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_dim; /* 0: head_dim */
  lean_tensor q;     /* [B, Hq, n_q, d] */
  lean_tensor k;     /* [B, Hkv, n_kv, d] */
  lean_tensor v;     /* [B, Hkv, n_kv, dv] */
  lean_tensor o;     /* [B, Hq, n_q, dv] */
  float* lse;        /* [B, Hq, n_q], or NULL */
  int64_t lse_sequence_stride;
  int64_t lse_head_stride;
  int64_t lse_token_stride;

  int32_t q_tokens;
  int32_t kv_capacity;
  int64_t total_q_tokens;
  int64_t total_kv_tokens;
  const int32_t* cu_q_tokens;  /* [B + 1], or NULL */
  const int32_t* kv_lengths;   /* [B], or NULL */
  const int32_t* kv_left_pad;  /* [B], or NULL */
  const int32_t* cu_kv_tokens; /* [B + 1], or NULL */

  int32_t page_tokens; /* 0: not paged */
  int32_t reserved0;
  int64_t page_count;
  const int32_t* block_table;
  int64_t block_table_stride; /* elements; for several sequences at least ceil(kv_capacity / page_tokens) */
  const int32_t* page_indptr;
  const int32_t* page_indices;

  float scale;         /* 0: 1 / sqrt(d); -0.0F: the number 0 */
  int32_t causal;      /* 0 or 1; bottom-right */
  int32_t window_left; /* -1: all */
  int32_t window_right;
  float softcap;
  int32_t mask_dtype;        /* a lean_dtype */
  const float* alibi_slopes; /* [Hq], or with alibi_sequence_stride [B, Hq] */
  const float* sinks;
  const void* mask;
  int64_t mask_sequence_stride;
  int64_t mask_head_stride;
  int64_t mask_query_stride;
  int64_t mask_key_stride;
  int32_t mask_is_boolean;
  int32_t reserved1;
  const uint32_t* tree_mask;

  lean_tensor append_k; /* data NULL: nothing to append */
  lean_tensor append_v;
  const float* rotary_cos;
  const float* rotary_sin;
  int32_t rotary_dim;
  int32_t rotary_interleaved;

  const float* k_scales;
  const float* v_scales;
  int32_t scales_per_head;
  int32_t reserved2;

  int64_t alibi_sequence_stride; /* elements; 0: all sequences have the same slopes */
  int32_t rotary_absolute;       /* 0 or 1; 1: positions count from token 0 instead of from the first valid token */
  int32_t reserved3;
  const int32_t* append_cached_lengths; /* [B], tokens before the call; or NULL. With it the call writes kv_lengths */
} lean_problem;

/* Runs body(argument, worker) once for every worker in [0, worker_count) and returns when all are done; a worker left out or
 * run twice gives backend_error. Without one, in a child of fork() whose parent had computed, calls run on the calling thread. */
typedef struct lean_executor {
  void* context;
  void (*run)(void* context, int32_t worker_count, void (*body)(void* argument, int32_t worker), void* argument);
  int32_t worker_count;
  int32_t descending_or_concurrent;
} lean_executor;

/* Ranks that an exchange may have. */
#define LEAN_MAX_RANKS 16

/* One rank's side of an exchange between GPUs of one host: lean::Exchange, field by field. lean_exchange_init() gives every field its
 * default, lean_exchange_create() a rank's memory. */
typedef struct lean_exchange {
  size_t struct_size;
  int32_t rank;
  int32_t ranks;
  void* memory[LEAN_MAX_RANKS]; /* by rank, as this device reaches it */
  size_t memory_bytes;          /* of each */
  int64_t limit_ns;             /* how long a call waits on the device for the other ranks; default 1 s */
  uint32_t* fault;              /* host memory that the device writes */
  int32_t device;               /* of lean_exchange_create(); -1: the memory is the caller's own */
  uint32_t opened;              /* of lean_exchange_open() */
} lean_exchange;

/* What another process opens a rank's memory by: plain bytes for whatever connects the two. */
typedef struct lean_exchange_handle {
  unsigned char bytes[64];
} lean_exchange_handle;

/* Dense rows of results, o [rows, value_dim] and lse [rows], and where the merged ones go: lean::ExchangedStates. */
typedef struct lean_exchanged_states {
  const void* o;
  const float* lse;
  void* merged_o;
  float* merged_lse;
  int64_t rows;
  int32_t value_dim;
  int32_t dtype; /* a lean_dtype */
} lean_exchanged_states;

/* Which tokens a rank holds: block j of a sequence, of block_tokens, lies on rank j mod ranks. lean::TokenShard. */
typedef struct lean_token_shard {
  int32_t rank;
  int32_t ranks;
  int32_t block_tokens;
} lean_token_shard;

/* How a call is carried out: lean::Options, field by field. lean_options_init() gives every field its default. */
typedef struct lean_options {
  size_t struct_size;
  int32_t backend;      /* a lean_backend */
  int32_t policy;       /* a lean_policy */
  int32_t splits;       /* fixed_split; 0: FlashDecoding's rule */
  int32_t chunk_tokens; /* fixed_chunk; 0: default */
  int32_t fixup;        /* a lean_fixup */
  int32_t determinism;  /* a lean_determinism */
  int32_t workers;      /* 0: all */
  int32_t cpu_isa;      /* 0: best */
  const lean_executor* executor;
  void* stream;
  int32_t dependent_launch;      /* boolean, 1 by default: a GPU's kernels may overlap those around them on the stream */
  int32_t check_workspace;       /* boolean */
  const lean_exchange* exchange; /* CUDA: the call is one rank's part of an exchange, in its own launch; or NULL */
} lean_options;

/* The memory of one call, which stays the caller's: host memory for the CPU, device memory for a GPU; in bytes. */
typedef struct lean_workspace {
  void* state;
  size_t state_bytes;
  void* scratch;
  size_t scratch_bytes;
} lean_workspace;

/* The library's version, "major.minor.patch". */
LEAN_API const char* lean_version(void);

/* The name of a lean_status_code, for example "invalid_argument"; "unknown" for any other number. */
LEAN_API const char* lean_status_name(int32_t code);

/* Set struct_size and every default. Called before any field is written. */
LEAN_API void lean_problem_init(lean_problem* problem);
LEAN_API void lean_options_init(lean_options* options);

/* Ok when lean_decode() would accept the call; else the reason. Looks at no memory behind a pointer. Codes: LEAN_INVALID_ARGUMENT,
 * LEAN_UNSUPPORTED, LEAN_TOO_LARGE. */
LEAN_API lean_status lean_supports(const lean_problem* problem, const lean_options* options);

/* Writes the bytes lean_decode() needs, which do not depend on lengths. The workspace's pointers must be aligned to 256 bytes, its state
 * zeroed once. Codes: as lean_supports(). */
LEAN_API lean_status lean_workspace_size(const lean_problem* problem, const lean_options* options, size_t* state_bytes,
                                         size_t* scratch_bytes);

/* Computes o = softmax(scale q k^T + mask) v for every sequence, and lse where it is not NULL. CPU: returns when the result is there;
 * CUDA: when the launch is enqueued on options->stream. Codes: those of lean_supports(), LEAN_WORKSPACE_TOO_SMALL,
 * LEAN_WORKSPACE_MISALIGNED, LEAN_WORKSPACE_DIRTY, LEAN_WORKSPACE_IN_USE, LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_decode(const lean_problem* problem, const lean_options* options, const lean_workspace* workspace);

/* Sets the state back to zero: before the first use of memory that is not zeroed, and after an aborted call. */
LEAN_API lean_status lean_reset_workspace(const lean_workspace* workspace, const lean_options* options);

/* The first fault that calls on this workspace saw in lengths or page ids since the last reset: LEAN_BAD_LENGTHS or LEAN_BAD_PAGE_INDEX,
 * with check_workspace also LEAN_WORKSPACE_DIRTY or LEAN_WORKSPACE_IN_USE. The message names the entry, but for CUDA's fast kernels.
 * CUDA: waits for options->stream. */
LEAN_API lean_status lean_sticky_status(const lean_workspace* workspace, const lean_options* options);

/* Whether lengths and page ids lie within what there is; the host must be able to read them. Codes: LEAN_BAD_LENGTHS,
 * LEAN_BAD_PAGE_INDEX, which also says that two sequences append to one page. */
LEAN_API lean_status lean_check_lengths(const lean_problem* problem);

/* Merges two results over disjoint keys: o_a [rows, value_dim] and lse_a [rows] become those of the union. Dense, no two of them
 * overlapping; dtype: LEAN_FLOAT32, LEAN_FLOAT16 or LEAN_BFLOAT16. Of options the backend counts (NULL: the CPU, all in host memory);
 * with CUDA all is in the current device's memory, and the merge is enqueued on options->stream. Codes: LEAN_INVALID_ARGUMENT,
 * LEAN_UNSUPPORTED, LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_merge_states(void* o_a, float* lse_a, const void* o_b, const float* lse_b, int64_t rows,
                                       int32_t value_dim, int32_t dtype, const lean_options* options);

/* Sets struct_size and every default: no memory. Called before any field is written. */
LEAN_API void lean_exchange_init(lean_exchange* exchange);

/* Bytes of memory that each rank needs for exchanges of so many rows at most; 0 where one of the numbers is none that is taken. */
LEAN_API size_t lean_exchange_bytes(int32_t ranks, int64_t rows, int32_t value_dim, int32_t dtype);

/* Takes zeroed memory of the current device for `rank` of `ranks`, of lean_exchange_bytes() of the largest call or more, the same on every
 * rank; writes the handle that other processes open it by where that is not NULL. Of `exchange`, which lean_exchange_init() has set,
 * limit_ns stays. Codes: LEAN_INVALID_ARGUMENT, LEAN_UNSUPPORTED (no CUDA backend, no device), LEAN_BACKEND_ERROR (no memory). */
LEAN_API lean_status lean_exchange_create(lean_exchange* exchange, int32_t rank, int32_t ranks, size_t memory_bytes,
                                          lean_exchange_handle* handle);

/* The memory of another process's rank, by its handle. Codes: LEAN_INVALID_ARGUMENT (no other rank, or there already),
 * LEAN_UNSUPPORTED, LEAN_BACKEND_ERROR (the device does not reach it, or the handle is of this process). */
LEAN_API lean_status lean_exchange_open(lean_exchange* exchange, int32_t rank, const lean_exchange_handle* handle);

/* The memory of another rank of this process, on a device that this one's is given access to. Codes: LEAN_INVALID_ARGUMENT (as before, or
 * other ranks), LEAN_UNSUPPORTED (the devices do not reach each other), LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_exchange_join(lean_exchange* exchange, const lean_exchange* other);

/* Zeroes one's own memory and the fault: by all ranks after a fault, while none is in a call. Codes: LEAN_INVALID_ARGUMENT (not of
 * lean_exchange_create()), LEAN_UNSUPPORTED, LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_exchange_clear(lean_exchange* exchange);

/* Gives back what create and open took, and leaves `exchange` as lean_exchange_init() does: while no rank is in a call. */
LEAN_API lean_status lean_exchange_close(lean_exchange* exchange);

/* Enqueues one kernel on options->stream that sends this rank's rows to all, waits for theirs within limit_ns and merges all in rank order:
 * the same bits on every rank. Every rank calls it, with the same sizes. options->backend is LEAN_CUDA. Codes: LEAN_INVALID_ARGUMENT,
 * LEAN_UNSUPPORTED, LEAN_WORKSPACE_TOO_SMALL, LEAN_WORKSPACE_MISALIGNED, LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_exchange_states(const lean_exchange* exchange, const lean_exchanged_states* states,
                                          const lean_options* options);

/* The first fault that calls which have ended met since the fault word was zero: LEAN_BACKEND_ERROR names the rank. Waits for nothing. */
LEAN_API lean_status lean_exchange_status(const lean_exchange* exchange);

/* held[i] = how many of the first tokens[i] tokens of a sequence a rank holds, for i below `count`. CPU (options NULL or LEAN_CPU): done
 * when it returns; CUDA: one kernel on options->stream, arrays in device memory. Codes: LEAN_INVALID_ARGUMENT, LEAN_UNSUPPORTED,
 * LEAN_BACKEND_ERROR. */
LEAN_API lean_status lean_shard_lengths(const int32_t* tokens, int32_t* held, int64_t count, const lean_token_shard* shard,
                                        const lean_options* options);

/* Writes the schedule of a call as text, zero-terminated, and at most buffer_bytes of it. Returns the bytes needed with the final zero, 0
 * when the call would be refused; format is a lean_schedule_format. Lengths must be readable by the host. A CUDA call that two launches
 * serve (lean::explain_schedule) is shown as one. */
LEAN_API size_t lean_explain_schedule(const lean_problem* problem, const lean_options* options, int32_t format, char* buffer,
                                      size_t buffer_bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LEAN_LEAN_H_ */

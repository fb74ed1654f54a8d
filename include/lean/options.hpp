// Options: how a call is carried out. What it computes is in Problem and does not depend on anything here
// beyond rounding.
#pragma once

#include <cstdint>

namespace lean {

struct Exchange;  // lean/exchange.hpp

/// Where a call runs. kCuda needs a library built with CUDA (LEAN_CUDA=ON) and takes the current device.
enum class Backend : std::int32_t { kCpu = 0, kCuda = 1 };

/// How work is dealt out over the workers; one kernel runs all four.
struct Policy {
  enum class Kind : std::int32_t {
    kLean = 0,          // stream-K: equal contiguous shares of one line of LeanTiles
    kFixedSplit = 1,    // FlashDecoding: every output cut into `splits` runs of tiles
    kDataParallel = 2,  // FlashAttention-2: one worker an output
    kFixedChunk = 3,    // shares cut only at multiples of `chunk_tokens`: batch-invariant bits
  };

  Kind kind = Kind::kLean;
  std::int32_t splits = 0;        // kFixedSplit only: >= 1, or 0 for FlashDecoding's own rule
  std::int32_t chunk_tokens = 0;  // kFixedChunk only: 0 means kDefaultChunkTokens

  static constexpr std::int32_t kDefaultChunkTokens = 1024;
  static constexpr std::int32_t kMaxSplits = 128;  // FlashDecoding's own limit

  [[nodiscard]] static constexpr Policy lean() noexcept { return {}; }
  [[nodiscard]] static constexpr Policy fixed_split(std::int32_t splits = 0) noexcept {
    return {.kind = Kind::kFixedSplit, .splits = splits};
  }
  [[nodiscard]] static constexpr Policy data_parallel() noexcept { return {.kind = Kind::kDataParallel}; }
  [[nodiscard]] static constexpr Policy fixed_chunk(std::int32_t tokens = 0) noexcept {
    return {.kind = Kind::kFixedChunk, .chunk_tokens = tokens};
  }
};

/// Who turns the partials of a shared output into one (docs/fixup.md).
enum class Fixup : std::int32_t {
  kLastArriver = 0,  // the contributor that arrives last merges; nobody waits
  kTwoKernels = 1,   // a second pass merges
  kHostBlock = 2,    // the paper's: the worker of the first tile waits for the others
};

/// What of a result's bits is promised.
enum class Determinism : std::int32_t {
  kRunToRun = 0,        // same inputs, options, workers and kind of device: same bits
  kBatchInvariant = 1,  // bits of a sequence depend on nothing but that sequence; asks for Policy::fixed_chunk
  kNotGuaranteed = 2,
};

/// Instruction sets the CPU backend is compiled for. kBest takes the fastest this machine runs: best_cpu_isa(), but kAmxBf16, where
/// there is that, for a call in bf16 with 4 rows or more for each kv head (query heads times query tokens; in chunks query heads).
enum class CpuIsa : std::int32_t {
  kBest = 0,
  kScalar = 1,
  kNative128 = 2,
  kAvx2 = 3,
  kAvx512 = 4,
  kAvx512Bf16 = 5,  // rounds probabilities to bf16 where K and V are bf16
  kAmxBf16 = 6,     // rounds probabilities to bf16 too
};

/// Runs body(argument, worker) once for every worker in [0, worker_count), on any threads, and returns when all
/// are done. The library's own executors are OpenMP or std::thread; a host with a thread pool passes its own. What run()
/// throws, once no worker runs any more, becomes backend_error, and so does a worker left out or run twice.
struct Executor {
  void* context = nullptr;
  void (*run)(void* context, std::int32_t worker_count, void (*body)(void* argument, std::int32_t worker),
              void* argument) = nullptr;
  std::int32_t worker_count = 0;  // threads it has; the default number of workers
  /// True when workers run at the same time, or each thread takes its workers in descending order:
  /// what Fixup::kHostBlock needs to end.
  bool descending_or_concurrent = false;
};

/// How a call is carried out. The defaults are right for most: the CPU, all its threads, the lean policy.
struct Options {
  static constexpr std::int32_t kMaxWorkers = 4096;

  Backend backend = Backend::kCpu;
  Policy policy{};
  Fixup fixup = Fixup::kLastArriver;
  Determinism determinism = Determinism::kRunToRun;
  /// Up to kMaxWorkers. 0: as many as the executor has threads, or a GPU multiprocessors, some decode steps of more outputs than that twice
  /// as many (docs/cuda-kernel.md); and no more than can have work.
  std::int32_t workers = 0;
  CpuIsa cpu_isa = CpuIsa::kBest;      // CPU only
  const Executor* executor = nullptr;  // CPU only; null: the library's own
  void* stream = nullptr;              // CUDA only: a cudaStream_t
  /// CUDA: programmatic dependent launch, where it can be: compute capability 9.0 and newer, any fix-up but host_block. The kernel may
  /// start while the one before it on the stream still runs, takes nothing from the call's memory and writes none of it until that one
  /// has ended, and lets the one after it start before its own end. Ahead of time it reads lengths, right or not yet: they tell it which
  /// K and V the L2 should fetch, and what to plan, which it looks at again once that one has ended. False: it starts when all that is
  /// before it on the stream has ended, and lets nothing start.
  bool dependent_launch = true;
  /// CUDA: a kernel before and one after the call find out whether the workspace serves another call at the same time, or
  /// counters are not zero; sticky_status() then says workspace_in_use or workspace_dirty. On the CPU every call looks, and
  /// refuses.
  bool check_workspace = false;
  /// CUDA: decode() is one rank's part of a call of several GPUs, each of which holds other keys of the same sequences: o and lse become
  /// those of all keys, on every rank, in the same launch, with the bits of exchange_states() behind decode() by as many workers: one a
  /// multiprocessor. Decode steps alone: one query a sequence, fp16 or bf16, d of 64 or 128, up to 16 query heads a K/V head, keys end to
  /// end or in pages, no rule that masks scores one by one, Fixup::kLastArriver, compute capability 9.0 or newer; supports() says whether
  /// it is such a call. All ranks make the call, with the same batch, heads and dims; a sink counts on one of them alone. Null: a call by
  /// itself.
  const Exchange* exchange = nullptr;
};

}  // namespace lean

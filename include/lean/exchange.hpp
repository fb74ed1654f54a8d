// Exchange: results that several GPUs of one host computed over disjoint keys of the same queries become one, on every one of them, over
// peer memory (NVLink, PCIe), without a collective library.
//
//   every rank: memory of the same size on its GPU, zeroed once, which all the others can reach: by peer access within a process, by
//   CUDA's IPC handles between processes (create_exchange() and its neighbours, or the caller's own); then, a call for each decode()
//   and on the same stream:
//   lean::Status status = lean::exchange_states(exchange, {.o = o, .lse = lse, ...}, options);
//
//   or, for decode steps, in decode()'s own launch: options.exchange = &exchange.
//
// Nothing is sent between hosts, and nothing is agreed on here: ranks make the same calls in the same order (docs/distributed.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "lean/export.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean {

/// One rank's side of an exchange. Its memory and fault word stay the caller's; ranks that make calls at the same time on two streams
/// need two. Calls of exchange_states() and of decode() with Options::exchange may follow each other in any order, the same on every
/// rank.
struct Exchange {
  static constexpr std::int32_t kMaxRanks = 16;

  std::int32_t rank = 0;
  std::int32_t ranks = 1;
  /// By rank, as this device reaches it: one's own, and the peers'. Aligned to 256 bytes, device memory, zero before the first call.
  /// Afterwards it is the exchange's: calls leave it ready for the next, faults too. Zeroed by all ranks, while none is in a call, it
  /// serves again where ranks made different calls.
  void* memory[kMaxRanks] = {};
  std::size_t memory_bytes = 0;           // of each; exchange_bytes() says how many
  std::int64_t limit_ns = 1'000'000'000;  // how long a call waits on the device for the other ranks
  /// A word of host memory that the device writes (pinned and mapped), zero before the first call: exchange_status() reads it.
  std::uint32_t* fault = nullptr;
  // Of create_exchange(); a caller whose own the memory is leaves both.
  std::int32_t device = -1;  // where it took the memory
  std::uint32_t opened = 0;  // bit r: memory[r] is another process's, by open_exchange()
};

/// What another process opens a rank's memory by: a cudaIpcMemHandle_t, plain bytes for whatever connects the two.
struct ExchangeHandle {
  unsigned char bytes[64] = {};
};

/// Dense rows of decode()'s results, and where the merged ones go: o [rows, value_dim], lse [rows]. merged_o may be o,
/// else no two overlap.
struct ExchangedStates {
  const void* o = nullptr;
  const float* lse = nullptr;
  void* merged_o = nullptr;
  float* merged_lse = nullptr;
  std::int64_t rows = 0;
  std::int32_t value_dim = 0;
  DType dtype = DType::kFloat32;  // float32, float16 or bfloat16
};

/// Which tokens of every sequence a rank holds where they are dealt out in blocks: block j, tokens from j x block_tokens on, lies on rank
/// j mod ranks, which keeps its blocks end to end.
struct TokenShard {
  std::int32_t rank = 0;
  std::int32_t ranks = 1;
  std::int32_t block_tokens = 16;
};

/// held[i] = how many of the first tokens[i] tokens of a sequence the rank holds, for i in [0, count); below 0 counts as 0. CPU: done when
/// it returns. CUDA: one kernel on options.stream, arrays in device memory; as with options.dependent_launch, whatever that says.
/// Codes: ok, invalid_argument, unsupported, backend_error.
[[nodiscard]] LEAN_API Status shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count,
                                            const TokenShard& shard, const Options& options) noexcept;

/// Bytes of memory that each rank needs for exchanges of so many rows at most; 0 where one of the numbers is none that
/// exchange_states() takes.
[[nodiscard]] LEAN_API std::size_t exchange_bytes(std::int32_t ranks, std::int64_t rows, std::int32_t value_dim,
                                                  DType dtype) noexcept;

/// Takes zeroed memory of the current device and the fault word for `rank` of `ranks`; `memory_bytes` is exchange_bytes() of the
/// largest call, or more, the same on every rank. Writes `exchange`, which must not hold memory already, and, where it is not null,
/// `handle`. The other ranks' memory comes by open_exchange() or join_exchange(). Not to be captured.
/// Codes: ok, invalid_argument, unsupported (no CUDA backend, no device), backend_error (CUDA's own, no memory): nothing is taken then.
[[nodiscard]] LEAN_API Status create_exchange(std::int32_t rank, std::int32_t ranks, std::size_t memory_bytes, Exchange& exchange,
                                              ExchangeHandle* handle) noexcept;

/// The memory of another process's `rank`, by its handle.
/// Codes: ok, invalid_argument (not a rank, one's own, or there already), unsupported, backend_error: the device does not reach it, or the
/// handle is of this process.
[[nodiscard]] LEAN_API Status open_exchange(Exchange& exchange, std::int32_t rank, const ExchangeHandle& handle) noexcept;

/// The memory of another rank of this process, on a device of its own, which this one's device is given access to.
/// Codes: ok, invalid_argument (other.rank is one's own, or there already; other.ranks differ), unsupported (the devices do not reach each
/// other), backend_error.
[[nodiscard]] LEAN_API Status join_exchange(Exchange& exchange, const Exchange& other) noexcept;

/// Zeroes one's own memory and the fault word: by all ranks after a fault, while none is in a call. Waits for it. Codes: ok,
/// invalid_argument (not of create_exchange()), unsupported, backend_error.
[[nodiscard]] LEAN_API Status clear_exchange(Exchange& exchange) noexcept;

/// Gives back what create_exchange() and open_exchange() took, and leaves `exchange` empty: while no rank is in a call. Of an empty one
/// it does nothing. Codes: ok, invalid_argument (ranks were written over), unsupported, backend_error (all else is given back).
[[nodiscard]] LEAN_API Status close_exchange(Exchange& exchange) noexcept;

/// Enqueues one kernel on options.stream: this rank's rows go to all ranks, theirs come, and all are merged in rank order in fp32,
/// rounded once. Every rank makes the call, with the same rows, value_dim and dtype; all get the same bits. Can be captured in a CUDA
/// graph. A state without keys (lse = -inf) changes nothing, whatever its o holds.
/// Where a rank does not come within the limit, rows that need it become NaN, the call ends, and the fault word says which.
/// options: backend kCuda, and the stream. Codes: ok, invalid_argument, unsupported, workspace_too_small, workspace_misaligned,
/// backend_error.
[[nodiscard]] LEAN_API Status exchange_states(const Exchange& exchange, const ExchangedStates& states,
                                              const Options& options) noexcept;

/// The first fault that calls met since the fault word was zero; backend_error names the rank. Waits for nothing: it tells of calls
/// that have ended.
[[nodiscard]] LEAN_API Status exchange_status(const Exchange& exchange) noexcept;

}  // namespace lean

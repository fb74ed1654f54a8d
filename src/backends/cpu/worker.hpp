// One worker of a call: LeanAttention, Alg. 2. It walks its segments, computes each by LeanTiles, and writes the output itself
// or hands its partial to the fix-up. All workers run the same Call; nothing in it changes while they do, but each one's Done.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "fixup/workspace.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "problem/sequence.hpp"
#include "schedule/segments.hpp"

namespace lean::cpu {

/// The lengths of a call, each read once from the caller's arrays: what another thread writes there meanwhile changes neither a
/// share nor an address.
struct Lengths {
  const Sequence* sequences = nullptr;

  [[nodiscard]] const Sequence& operator()(std::int64_t sequence) const noexcept { return sequences[sequence]; }
};

using Line = schedule::WorkLine<Lengths>;

/// What a worker has done, for the sum that every call ends with.
struct Done {
  std::int64_t tiles = 0;
  std::int64_t outputs = 0;  // written
  std::int32_t passes = 0;   // of append_new_tokens()
};

struct Call {
  const Problem& problem;
  const Line& line;
  const schedule::Plan& plan;
  const TileKernels& kernels;
  Fixup fixup;
  fixup::Slots slots;
  WorkerMemoryLayout memory;
  std::byte* worker_memory;  // memory.bytes() for each worker
  Done* done;                // one for each worker
  float log2_scale;
};

/// Writes the worker's share of the new tokens to the cache, ahead of a call that then has none: where a kv head has several row
/// blocks, each of them would make all that it sees; and where one sequence reads what another appends.
void append_new_tokens(const Call& call, std::int32_t worker) noexcept;

/// Computes every segment of `worker`. With Fixup::kTwoKernels shared outputs are left to merge_shared_outputs().
void run_worker(const Call& call, std::int32_t worker) noexcept;

/// The second pass of Fixup::kTwoKernels: merges the outputs whose first tile `worker` computed.
void merge_shared_outputs(const Call& call, std::int32_t worker) noexcept;

}  // namespace lean::cpu

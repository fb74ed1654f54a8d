// TileLoop: LeanTile() of the paper (Alg. 1) on a CPU thread: the queries of one output, then scores, online softmax and
// accumulate for each tile of a run. Knows nothing of other workers; worker.cpp decides which runs.
#pragma once

#include <cstdint>

#include "backends/cpu/elements.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "fixup/partial.hpp"
#include "lean/problem.hpp"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean::cpu {

/// The output a run of tiles belongs to.
struct TileOutput {
  Sequence lengths;
  HeadPosition kv_head;
  std::int64_t first_row = 0;  // packed row of the row block's first
  std::int32_t rows = 0;
};

class TileLoop {
 public:
  TileLoop(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory, float log2_scale) noexcept
      : problem_(problem), kernels_(kernels), memory_(memory), log2_scale_(log2_scale) {}

  /// Loads the queries of `output`; run() is about it until the next call.
  void begin(const TileOutput& output) noexcept;

  /// Adds tiles [tile_begin, tile_end) of the output to `into`.
  void run(std::int64_t tile_begin, std::int64_t tile_end, const fixup::Partial& into) noexcept;

 private:
  [[nodiscard]] std::int32_t visible_end_of(std::int32_t row) const noexcept;
  void set_visible(std::int64_t token, std::int32_t tokens) noexcept;
  [[nodiscard]] TokenRows tile_rows(const TensorView& tensor, std::int64_t first_elem, std::int32_t tokens, std::int32_t dims,
                                    float* packed) const noexcept;

  const Problem& problem_;
  const TileKernels& kernels_;
  const WorkerMemory& memory_;
  float log2_scale_;
  TileOutput output_;
};

}  // namespace lean::cpu

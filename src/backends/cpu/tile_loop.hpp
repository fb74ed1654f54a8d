// TileLoop: LeanTile() of the paper (Alg. 1) on a CPU thread: the queries of one output, then scores, online softmax and
// accumulate for each tile of a run. Knows nothing of other workers; worker.cpp decides which runs.
#pragma once

#include <cstdint>

#include "backends/cpu/kv_tiles.hpp"
#include "backends/cpu/score_rules.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/tile_output.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "fixup/partial.hpp"
#include "lean/problem.hpp"

namespace lean::cpu {

class TileLoop {
 public:
  TileLoop(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory, float log2_scale) noexcept
      : problem_(problem),
        kernels_(kernels),
        memory_(memory),
        log2_scale_(log2_scale),
        tiles_(problem, kernels, memory),
        rules_(problem, kernels, memory) {}

  /// Loads the queries of `output`; run() is about it until the next call.
  void begin(const TileOutput& output) noexcept;

  /// Puts the partial of tiles [tile_begin, tile_end), numbered from the sequence's first, into the empty partial `into`.
  void run(std::int64_t tile_begin, std::int64_t tile_end, const fixup::Partial& into) noexcept;

  [[nodiscard]] bool met_bad_page() const noexcept { return tiles_.met_bad_page(); }

 private:
  /// The block's rows as kernels take them.
  struct Rows {
    QueryRows q;
    RowBuffer s;
    RowBuffer o;
    RowBuffer sums;
    SoftmaxRows softmax;
  };
  [[nodiscard]] Rows rows_of(const fixup::Partial& into) const noexcept;
  void compute(KvTile& tile, const fixup::Partial& into, const Prefetch& with_scores,
               const Prefetch& with_accumulate) const noexcept;
  void compute_turned(KvTile& tile, const fixup::Partial& into, const Prefetch& with_scores,
                      const Prefetch& with_accumulate) const noexcept;
  void set_visible(std::int64_t token, std::int32_t tokens) noexcept;
  /// The rows as the kernels read them: in place, or as an fp32 copy in `packed`.
  [[nodiscard]] TokenRows kernel_rows(const TensorView& tensor, const TokenRows& rows, float* packed) const noexcept;

  const Problem& problem_;
  const TileKernels& kernels_;
  const WorkerMemory& memory_;
  float log2_scale_;
  float score_scale_ = 0.0F;  // with K's own scale
  KvTiles tiles_;
  ScoreRules rules_;
  TileOutput output_;
};

}  // namespace lean::cpu

// One LeanTile at d = 128, K and V in the cache: scores, online softmax and accumulate, for each instruction set of this machine
// and each element type, whole and a stage at a time. Beside a core's share of the memory bandwidth, the bytes per second say what
// limits a call. "memory": tiles of few rows one after the other from more memory than caches hold, as a call reads them.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "backends/cpu/cpu_backend.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "bench/aligned_buffer.hpp"
#include "lean/float_types.hpp"
#include "lean/lean.hpp"
#include "softmax/scale.hpp"
#include "tile/tile_config.hpp"

namespace lean::bench {
namespace {

constexpr std::int32_t kHeadDim = 128;
constexpr std::uint32_t kSeed = 1;
constexpr std::int32_t kFewRows = 8;
constexpr std::int64_t kMemoryBytes = std::int64_t{256} << 20;

enum class Stage : std::uint8_t { kAll, kScores, kSoftmax, kAccumulate };

struct Variant {
  CpuIsa isa = CpuIsa::kScalar;
  DType dtype = DType::kFloat32;
  std::int32_t rows = 1;
  Stage stage = Stage::kAll;
  std::int64_t bytes = 0;  // of K and V in memory; 0: one tile, in the cache
};

cpu::WorkerMemoryLayout layout_of(const Variant& variant) {
  Problem problem{.q_heads = variant.rows, .kv_heads = 1, .head_dim = kHeadDim};
  for (TensorView* tensor : {&problem.q, &problem.k, &problem.v}) tensor->dtype = variant.dtype;
  return cpu::plan_call(problem, {.cpu_isa = variant.isa}).memory;
}

/// A worker's private buffers and one tile of N(0, 1) keys and values.
class Tile {
 public:
  explicit Tile(const Variant& variant)
      : variant_(variant),
        layout_(layout_of(variant)),
        tiles_(std::max<std::int64_t>(1, variant.bytes / bytes())),
        private_(layout_.bytes()),
        k_(tiles_ * bytes() / 2),
        v_(tiles_ * bytes() / 2),
        memory_(layout_, private_.data()) {
    fill(k_.data());
    fill(v_.data());
    begin_output();
    compute(Stage::kAll);  // what a stage alone finds are numbers, though not the stage's before it
  }
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;

  [[nodiscard]] std::int32_t tokens() const { return layout_.config.tile_tokens; }
  [[nodiscard]] std::int64_t bytes() const { return 2 * std::int64_t{tokens()} * token_bytes(); }  // of K and V
  [[nodiscard]] std::int64_t multiply_adds() const { return 2 * std::int64_t{variant_.rows} * tokens() * kHeadDim; }

  /// The next tile of those that there are.
  void compute(Stage stage) {
    const auto takes = [&](Stage one) { return stage == Stage::kAll || stage == one; };
    const std::int32_t rows = variant_.rows;
    const int type = cpu::table_index(variant_.dtype);
    const fixup::Partial partial = memory_.partial(0);
    const cpu::RowBuffer s{memory_.scores, rows, layout_.score_stride()};
    const cpu::RowBuffer o{partial.o, rows, layout_.config.value_dim};
    const cpu::RowBuffer sums{memory_.sums, rows, o.stride};
    const cpu::QueryRows q{{memory_.query, rows, layout_.config.head_dim}, memory_.query_bf16};
    const cpu::SoftmaxRows softmax{softmax::log2_scale(0.0F, kHeadDim), memory_.visible, partial.m, partial.l, memory_.rescale};
    if (layout_.turned != nullptr && stage == Stage::kAll) {
      layout_.turned->compute({.q = q,
                               .k = tile_rows(k_, tile_),
                               .v = tile_rows(v_, tile_),
                               .turned_k = memory_.packed_k,
                               .turned_v = memory_.packed_v,
                               .s = s,
                               .sums = sums,
                               .o = o,
                               .softmax = softmax});
      return;
    }
    const std::int64_t next = (tile_ + 1) % tiles_;
    cpu::RowsAhead ahead;
    const auto ask_for = [&](const cpu::TokenRows& rows) {
      return tiles_ == 1 ? cpu::Prefetch{} : cpu::Prefetch{rows, cpu::read_ahead_bytes(), &ahead};
    };
    if (takes(Stage::kScores)) {
      const bool alone = stage == Stage::kScores;
      kernels_.scores[type](q, tile_rows(k_, tile_), s, ask_for(alone ? tile_rows(k_, next) : tile_rows(v_, tile_)));
    }
    if (takes(Stage::kSoftmax)) kernels_.online_softmax(s, tokens(), softmax);
    if (takes(Stage::kAccumulate)) {
      const bool alone = stage == Stage::kAccumulate;
      const cpu::Prefetch prefetch = ask_for(tile_rows(alone ? v_ : k_, next));
      kernels_.accumulate[type](o, sums, s, tile_rows(v_, tile_), memory_.rescale, prefetch);
    }
    tile_ = next;
  }

 private:
  [[nodiscard]] std::int64_t token_bytes() const { return kHeadDim * bytes_of(variant_.dtype); }
  [[nodiscard]] cpu::TokenRows tile_rows(AlignedBuffer& rows, std::int64_t tile) const {
    return {rows.data() + tile * bytes() / 2, token_bytes(), tokens(), kHeadDim};
  }

  void fill(std::byte* rows) {
    float row[kHeadDim];
    for (std::int32_t t = 0; t < tokens(); ++t) {
      for (float& x : row) x = normal_(random_);
      kernels_.store_row[cpu::table_index(variant_.dtype)](row, 1.0F, rows + t * token_bytes(), kHeadDim);
    }
    for (std::int64_t tile = 1; tile < tiles_; ++tile)
      std::memcpy(rows + tile * bytes() / 2, rows, static_cast<std::size_t>(bytes() / 2));
  }

  void begin_output() {
    for (std::int32_t r = 0; r < variant_.rows; ++r) {
      float* row = memory_.query + r * kHeadDim;
      for (std::int32_t i = 0; i < kHeadDim; ++i) {
        row[i] = normal_(random_);
        memory_.query_bf16[r * kHeadDim + i] = from_float<BFloat16>(row[i]).bits;
      }
      kernels_.order_query[cpu::table_index(variant_.dtype)](row, kHeadDim);
      memory_.visible[r] = tokens();
      memory_.partial(0).m[r] = softmax::kNegInf;
    }
  }

  Variant variant_;
  cpu::WorkerMemoryLayout layout_;
  std::int64_t tiles_;
  std::int64_t tile_ = 0;
  AlignedBuffer private_;
  AlignedBuffer k_;
  AlignedBuffer v_;
  cpu::WorkerMemory memory_;
  const cpu::TileKernels& kernels_ = cpu::kernels_for(variant_.isa);
  std::mt19937 random_{kSeed};
  std::normal_distribution<float> normal_;
};

void lean_tile(benchmark::State& state, const Variant& variant) {
  Tile tile(variant);
  for (auto _ : state) {
    tile.compute(variant.stage);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * tile.bytes());
  state.counters["FMA"] =
      benchmark::Counter(static_cast<double>(tile.multiply_adds()), benchmark::Counter::kIsIterationInvariantRate);
}

/// Which instruction sets there are is known at run time only.
[[maybe_unused]] const bool kRegistered = [] {
  for (const CpuIsa isa :
       {CpuIsa::kScalar, CpuIsa::kNative128, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16}) {
    if (!cpu_isa_available(isa)) continue;
    for (const auto& [dtype, type_name] :
         {std::pair{DType::kFloat32, "fp32"}, {DType::kFloat16, "fp16"}, {DType::kBFloat16, "bf16"}}) {
      for (const std::int32_t rows : {1, 4, 8, 128}) {
        const std::string name = std::string("lean_tile/") + name_of(isa) + "/" + type_name + "/rows:" + std::to_string(rows);
        for (const auto& [stage, of_stage] : {std::pair{Stage::kAll, ""},
                                              {Stage::kScores, "/scores"},
                                              {Stage::kSoftmax, "/softmax"},
                                              {Stage::kAccumulate, "/accumulate"}}) {
          benchmark::RegisterBenchmark((name + of_stage).c_str(), lean_tile, Variant{isa, dtype, rows, stage});
          if (rows > kFewRows || isa == CpuIsa::kAmxBf16) continue;  // AMX asks ahead in steps that TileLoop deals out
          benchmark::RegisterBenchmark((name + of_stage + "/memory").c_str(), lean_tile,
                                       Variant{isa, dtype, rows, stage, kMemoryBytes});
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace lean::bench

// The table of variants: what is built, for which architecture, and why. Read by the instantiations, the choice of a kernel, the
// build's check of spills (tools/cuda_build.py) and docs/cuda-backend.md, all of which follow when a row is changed or added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "backends/cuda/kernel_config.hpp"
#include "lean/limits.hpp"

namespace lean::cuda {

/// Why a row is as it is.
struct Reason {
  const char* why = "";
  const char* measured = "";  // a file below bench/results
};

/// One row block and its tile, for K and V of a kind and up to so many dims. Rows of an architecture, a scope, a kind and a width
/// stand together, the narrowest row block first: a call takes the first that holds its rows, or the last.
struct KernelRow {
  Scope scope = Scope::kAnyCall;
  std::int32_t kv_bytes =
      0;  // of an element in a stage: 2 is a kernel each for fp16 and bf16, 1 one for both fp8 types, as is what converts
  std::int32_t head_dim = 0;        // the widest
  std::int32_t q_rows = 0;          // of a row block
  std::int32_t tile_tokens = 0;     // of a LeanTile
  std::int32_t consumer_warps = 0;  // of a CTA
  std::int32_t spill_bytes = 0;     // that its kernels may store, a little above what is compiled; none is the aim
  Reason reason{};
};

namespace rows {

using enum Scope;

// What decides a tile: K of 32 KB, where the registers of its scores and the shared memory allow (sweep in docs/notebook).
// Eight consumer warps hide the latency of a tile better than four, but above 128 dims the accumulators leave registers for four
// only, and for 64 rows at most.

inline constexpr Reason kAny{"128 tokens: small enough for parts with 99 KB of shared memory, at d 64 too",
                             "experiments/h200-d64-tiles.jsonl"};
inline constexpr Reason kAnyMany{"64 tokens: the scores of more rows leave no registers for 128", "h200-prefill-mix.jsonl"};
inline constexpr Reason kWide{"four warps of 64 tokens: accumulators of 256 dims take the registers", "h200-tier-b.jsonl"};
inline constexpr Reason kFp8{"twice the tokens of 16 bits are as many bytes in flight; half are slower",
                             "experiments/h200-narrow-fp8.jsonl"};
inline constexpr Reason kFp8Many{"as in 16 bits: bound by arithmetic, not by bytes in flight", "h200-tier-b.jsonl"};

inline constexpr Reason kNarrow{"narrow products, tokens as their rows: no half of 16 rows is computed for nothing",
                                "experiments/h200-narrow-tile.jsonl"};
inline constexpr Reason kNarrowFp8{"narrow products, and runs, which come earlier than boxes", "experiments/h200-narrow-fp8.jsonl"};
inline constexpr Reason kNarrowBoxes{"narrow products from columns", "experiments/h200-narrow-fp8.jsonl"};
inline constexpr Reason kNarrowThreads{"narrow products from rows that threads copy", "experiments/h200-narrow-fp8.jsonl"};
inline constexpr Reason kStep{"a decode step's code and registers, and nothing else", "h200-tier-b.jsonl"};
inline constexpr Reason kLongTiles{"256 tokens of d 64 are 32 KB of K; parts without memory for it take any call's",
                                   "experiments/h200-d64-tiles.jsonl"};
inline constexpr Reason kThreads{"rows with gaps by threads, in a decode step's code", "experiments/h200-layouts.jsonl"};
inline constexpr Reason kBoxes{"columns that need no piece put right: less to compute of many rows",
                               "experiments/h200-tensor-steps.jsonl"};
inline constexpr Reason kBoxesFp8{"a third of the instructions of fp8 rows put pieces right, which columns need not",
                                  "experiments/h200-tensor-steps.jsonl"};
inline constexpr Reason kWarpgroups{"many rows: two warpgroups of 64, the products of one beside the other's softmax",
                                    "experiments/h100-wide-tile.jsonl"};
inline constexpr Reason kWarpgroups96{"a quarter of 128 dims is not multiplied for nothing", "h200-prefill.jsonl"};
inline constexpr Reason kWarpgroups192{
    "96 tokens: what a warpgroup does once a tile is a third less than of 64, and four tiles fit beside the queries",
    "experiments/h200-taller-tiles.jsonl"};
inline constexpr Reason kWarpgroups256{
    "64 tokens: two of keys and two of values fit beside the queries, and whole boxes of any page", "h200-prefill.jsonl"};
inline constexpr Reason kFewValues{"values of 128 dims are not filled up to the keys' 192, and leave room for tiles of 128 tokens",
                                   "h200-prefill.jsonl"};
inline constexpr Reason kWideRuled{
    "ALiBi, masks and tree masks of many rows: by any call's kernels they took 3 to 14 times as long", "h200-rules.jsonl"};
inline constexpr Reason kWideFp8{"fp8, half the bytes: threads make fp16 of rows, and the tile is that of 16 bits",
                                 "h200-prefill-fp8.jsonl"};
inline constexpr Reason kLatent{"values in the keys' memory, read once: 64 rows, and 256 dims of the values a warpgroup",
                                "experiments/h200-latent.jsonl"};
inline constexpr Reason kInTurns{"long calls of many rows: the softmax of one warpgroup beside the products of the other",
                                 "experiments/h100-latent-turns.jsonl"};
inline constexpr Reason kLatentFp8{"fp8 rows, half the bytes: threads make fp16 of them, and the tile is that of 16 bits",
                                   "h200-mla-fp8.jsonl"};
inline constexpr Reason kSwapped{"few rows: tokens and dims are the rows of products, and none of 64 is empty", "h200-mla.jsonl"};
inline constexpr Reason kSwappedFp8{"the same of fp8 rows", "h200-mla-fp8.jsonl"};
inline constexpr Reason kBeside{
    "a tensor step of few rows beside chunks: what it asks ahead of all else cost every other step 1 to 2 %",
    "experiments/h200-step-regression.jsonl"};
inline constexpr Reason kExchanged{"a decode step whose rows leave for the other ranks as they are finished",
                                   "h100-multi-gpu.jsonl"};
inline constexpr Reason kPaired{"two CTAs of a multiprocessor, of half the warps and half the tile: many outputs",
                                "experiments/h200-paired.jsonl"};
inline constexpr Reason kRuled{
    "softcap, ALiBi and masks in a decode step's code: by any call's they took 2.3 to 2.8 times the read", "h200-features.jsonl"};
inline constexpr Reason kChunks{"a decode step's code under fixed_chunk; tiles as of any call, since they fix the order of sums",
                                "h200-chunks.jsonl"};

// clang-format off: one row, one line
inline constexpr KernelRow kSm80[] = {
    // scope, bytes, d, rows, tokens, warps, spills, reason
    {kAnyCall,     2, 64,  16,  128, 8, 0,    kAny},
    {kAnyCall,     2, 64,  32,  128, 8, 0,    kAny},
    {kAnyCall,     2, 64,  64,  64,  8, 0,    kAnyMany},
    {kAnyCall,     2, 64,  128, 64,  8, 48,   kAnyMany},
    {kAnyCall,     2, 128, 16,  128, 8, 48,   kAny},
    {kAnyCall,     2, 128, 32,  128, 8, 288,  kAny},
    {kAnyCall,     2, 128, 64,  64,  8, 288,  kAnyMany},
    {kAnyCall,     2, 128, 128, 64,  8, 712,  kAnyMany},
    {kAnyCall,     2, 256, 16,  64,  4, 80,   kWide},
    {kAnyCall,     2, 256, 32,  64,  4, 264,  kWide},
    {kAnyCall,     2, 256, 64,  64,  4, 1284, kWide},
    {kAnyCall,     1, 64,  16,  256, 8, 0,    kFp8},
    {kAnyCall,     1, 64,  32,  128, 8, 0,    kFp8Many},
    {kAnyCall,     1, 64,  64,  64,  8, 0,    kFp8Many},
    {kAnyCall,     1, 64,  128, 64,  8, 32,   kFp8Many},
    {kAnyCall,     1, 128, 16,  256, 8, 152,  kFp8},
    {kAnyCall,     1, 128, 32,  128, 8, 152,  kFp8Many},
    {kAnyCall,     1, 128, 64,  64,  8, 152,  kFp8Many},
    {kAnyCall,     1, 128, 128, 64,  8, 592,  kFp8Many},
    {kAnyCall,     1, 256, 16,  128, 4, 352,  kFp8},
    {kAnyCall,     1, 256, 32,  64,  4, 376,  kFp8Many},
    {kAnyCall,     1, 256, 64,  64,  4, 1024, kFp8Many},
};

inline constexpr KernelRow kSm90[] = {
    // scope, bytes, d, rows, tokens, warps, spills, reason
    {kDecodeStep,  2, 64,  8,   256, 8, 0,    kLongTiles},
    {kDecodeStep,  2, 64,  16,  256, 8, 0,    kLongTiles},
    {kDecodeStep,  2, 128, 8,   128, 8, 0,    kNarrow},
    {kDecodeStep,  2, 128, 16,  128, 8, 0,    kStep},
    {kDecodeStep,  2, 256, 8,   64,  4, 0,    kNarrow},
    {kDecodeStep,  2, 256, 16,  64,  4, 0,    kStep},
    {kDecodeStep,  1, 64,  8,   512, 8, 0,    kNarrowFp8},
    {kDecodeStep,  1, 128, 8,   256, 8, 0,    kNarrowFp8},
    {kDecodeStep,  1, 256, 8,   128, 4, 0,    kNarrowFp8},
    {kExchangedStep, 2, 64, 8,  256, 8, 0,    kExchanged},
    {kExchangedStep, 2, 64, 16, 256, 8, 0,    kExchanged},
    {kExchangedStep, 2, 128, 8, 128, 8, 0,    kExchanged},
    {kExchangedStep, 2, 128, 16, 128, 8, 0,   kExchanged},
    {kStridedStep, 2, 64,  8,   256, 8, 164,  kNarrowThreads},
    {kStridedStep, 2, 64,  16,  256, 8, 60,   kThreads},
    {kStridedStep, 2, 128, 8,   128, 8, 88,   kNarrowThreads},
    {kStridedStep, 2, 128, 16,  128, 8, 36,   kThreads},
    {kStridedStep, 2, 256, 8,   64,  4, 0,    kNarrowThreads},
    {kStridedStep, 2, 256, 16,  64,  4, 132,  kThreads},
    {kTensorStep,  2, 64,  8,   256, 8, 4,    kNarrowBoxes},
    {kTensorStep,  2, 64,  16,  256, 8, 0,    kBoxes},
    {kTensorStep,  2, 64,  32,  256, 8, 0,    kBoxes},
    {kTensorStep,  2, 64,  64,  128, 8, 0,    kBoxes},
    {kTensorStep,  2, 64,  128, 64,  8, 0,    kBoxes},
    {kTensorStep,  2, 128, 8,   128, 8, 0,    kNarrowBoxes},
    {kTensorStep,  2, 128, 16,  128, 8, 0,    kBoxes},
    {kTensorStep,  2, 128, 32,  128, 8, 0,    kBoxes},
    {kTensorStep,  2, 128, 64,  64,  8, 0,    kBoxes},
    {kTensorStep,  2, 128, 128, 64,  8, 64,   kBoxes},
    {kTensorStep,  2, 256, 8,   64,  4, 0,    kNarrowBoxes},
    {kTensorStep,  2, 256, 16,  64,  4, 0,    kBoxes},
    {kTensorStep,  2, 256, 32,  64,  4, 0,    kBoxes},
    {kTensorStep,  2, 256, 64,  64,  4, 0,    kBoxes},
    {kTensorStep,  1, 64,  8,   512, 8, 44,   kNarrowBoxes},
    {kTensorStep,  1, 64,  16,  512, 8, 20,   kBoxesFp8},
    {kTensorStep,  1, 64,  32,  256, 8, 0,    kBoxesFp8},
    {kTensorStep,  1, 64,  64,  128, 8, 0,    kBoxesFp8},
    {kTensorStep,  1, 64,  128, 64,  8, 0,    kBoxesFp8},
    {kTensorStep,  1, 128, 8,   256, 8, 0,    kNarrowBoxes},
    {kTensorStep,  1, 128, 16,  256, 8, 8,    kBoxesFp8},
    {kTensorStep,  1, 128, 32,  128, 8, 28,   kBoxesFp8},
    {kTensorStep,  1, 128, 64,  64,  8, 28,   kBoxesFp8},
    {kTensorStep,  1, 128, 128, 64,  8, 208,  kBoxesFp8},
    {kTensorStep,  1, 256, 8,   128, 4, 0,    kNarrowBoxes},
    {kTensorStep,  1, 256, 16,  128, 4, 96,   kBoxesFp8},
    {kTensorStep,  1, 256, 32,  64,  4, 96,   kBoxesFp8},
    {kTensorStep,  1, 256, 64,  64,  4, 392,  kBoxesFp8},
    {kPairedStep,  2, 64,  8,   128, 4, 0,    kPaired},
    {kPairedStep,  2, 128, 8,   64,  4, 0,    kPaired},
    {kPairedStep,  1, 64,  8,   256, 4, 0,    kPaired},
    {kPairedStep,  1, 128, 8,   128, 4, 0,    kPaired},
    {kPairedTensorStep, 2, 64, 8, 128, 4, 4,  kPaired},
    {kPairedTensorStep, 2, 128, 8, 64, 4, 0,  kPaired},
    {kRuledStep,   2, 64,  8,   256, 8, 4,    kRuled},
    {kRuledStep,   2, 64,  16,  256, 8, 0,    kRuled},
    {kRuledStep,   2, 64,  32,  256, 8, 20,   kRuled},
    {kRuledStep,   2, 64,  64,  128, 8, 20,   kRuled},
    {kRuledStep,   2, 128, 8,   128, 8, 0,    kRuled},
    {kRuledStep,   2, 128, 16,  128, 8, 0,    kRuled},
    {kRuledStep,   2, 128, 32,  128, 8, 28,   kRuled},
    {kRuledStep,   2, 128, 64,  64,  8, 28,   kRuled},
    {kRuledStep,   2, 256, 8,   64,  4, 0,    kRuled},
    {kRuledStep,   2, 256, 16,  64,  4, 0,    kRuled},
    {kRuledStep,   2, 256, 32,  64,  4, 0,    kRuled},
    {kRuledStep,   2, 256, 64,  64,  4, 80,   kRuled},
    {kRuledStep,   1, 64,  8,   512, 8, 44,   kRuled},
    {kRuledStep,   1, 64,  16,  512, 8, 56,   kRuled},
    {kRuledStep,   1, 128, 8,   256, 8, 0,    kRuled},
    {kRuledStep,   1, 128, 16,  256, 8, 176,  kRuled},
    {kRuledStep,   1, 256, 8,   128, 4, 0,    kRuled},
    {kRuledStep,   1, 256, 16,  128, 4, 240,  kRuled},
    {kBesideStep,  2, 64,  16, 256, 8, 0,    kBeside},
    {kBesideStep,  2, 128, 16, 128, 8, 0,    kBeside},
    {kBesideStep,  2, 256, 16, 64,  4, 0,    kBeside},
    {kChunkStep,   2, 64,  16,  128, 8, 0,    kChunks},
    {kChunkStep,   2, 128, 16,  128, 8, 0,    kChunks},
    {kChunkStep,   2, 256, 16,  64,  4, 0,    kChunks},
    {kChunkStep,   1, 64,  16,  256, 8, 0,    kChunks},
    {kChunkStep,   1, 128, 16,  256, 8, 24,   kChunks},
    {kChunkStep,   1, 256, 16,  128, 4, 96,   kChunks},
};

inline constexpr KernelRow kWide90[] = {
    // scope, bytes, d, rows, tokens, warps, spills, reason
    {kWideTile,    2, 64,  128, 128, 8, 16,   kWarpgroups},
    {kWideFp8Tile, 2, 64,  128, 128, 8, 0,    kWideFp8},
    {kWideRuledTile, 2, 64, 128, 128, 8, 0,   kWideRuled},
    {kWideTile,    2, 96,  128, 128, 8, 28,   kWarpgroups96},
    {kWideTile,    2, 128, 128, 128, 8, 64,   kWarpgroups},
    {kWideFp8Tile, 2, 128, 128, 128, 8, 24,   kWideFp8},
    {kWideRuledTile, 2, 128, 128, 128, 8, 164, kWideRuled},
    {kWideTile,    2, 192, 128, 96,  8, 80,   kWarpgroups192},
    {kFewValuesTile, 2, 192, 128, 128, 8, 64, kFewValues},
    {kWideTile,    2, 256, 128, 64,  8, 144,  kWarpgroups256},
    {kWideFp8Tile, 2, 256, 128, 64,  8, 116,  kWideFp8},
    {kLatentTile,  2, 576, 64,  64,  8, 24,   kLatent},
    {kLatentTurns, 2, 576, 64,  64,  8, 140,  kInTurns},
    {kLatentFp8Tile, 2, 576, 64, 64, 8, 48,   kLatentFp8},
    {kLatentSwapped, 2, 576, 16, 64, 4, 0,    kSwapped},
    {kLatentSwapped, 2, 576, 32, 64, 4, 0,    kSwapped},
    {kLatentFp8Swapped, 2, 576, 16, 64, 4, 0, kSwappedFp8},
    {kLatentFp8Swapped, 2, 576, 32, 64, 4, 140, kSwappedFp8},
};
// clang-format on

}  // namespace rows

/// Which calls of a wide row's dims it takes, of those that ask for nothing it lacks.
struct WideRule {
  std::int32_t fewest_rows = 0;   // packed rows of a kv head
  std::int32_t fewest_tiles = 0;  // a worker's, at the call's capacity, of calls that another kernel serves too
  Reason reason{};
};

/// A tile of 128 tokens takes a wide kernel 2.0 us, whatever its rows, and no less than its read, 3.1 us on an H100 and 1.9 on an
/// H200. A decode step (mma.sync) takes 2.6 us for 64 rows, so there is at most a fifth to gain below them, and 5.2 for 128; calls of
/// more rows are any call's without it, at 12 us. But a wide call pays 50 us beside its tiles (fit in kernel_config.hpp), a step 10:
/// 12 to 19 tiles a worker make up for that. 4 x 32 of 8192, 16 tiles: 110 us wide, and by this arithmetic 93 in a step.
inline constexpr WideRule kWideRule{
    .fewest_rows = 65,
    .fewest_tiles = 18,
    .reason = {"many rows, or enough tiles to pay for a segment's ends",
               "experiments/h100-wide-tile.jsonl, h200-tier-b.jsonl (n_q16), h200-prefill-mix.jsonl"}};

/// The latent kernel in turns. A first tile's weights have to be there before the other warpgroup goes on, which takes a worker of a few
/// tiles 1 to 5 us more: on an H100 8 tiles (1 x 32k, 4 x 8k of 128 heads) took 69 and 62 us for 64 and 57, 31 tiles (4 x 32k, 16 x 8k)
/// 107 and 109 for 111 and 112, 62 (64 x 4k) 156 for 176, 248 (the same of 4 query tokens) 549 for 652; 24 lie between, where a line
/// through the first two meets 0. With one row block the memory is what a call waits for, and 64 x 4k of 16 heads took 134 us for 130.
inline constexpr WideRule kTurnsRule{
    .fewest_rows = 65,
    .fewest_tiles = 24,
    .reason = {"more than one row block, and tiles that make up for the first's wait", "experiments/h100-latent-turns.jsonl"}};

/// Which calls of few rows have two workers on a multiprocessor: a stream's end, a merge and the next segment's queries of one are
/// hidden behind the other's tiles.
struct PairedRule {
  std::int32_t outputs_percent = 0;  // outputs at the call's capacity, of the multiprocessors
  Reason reason{};
};
inline constexpr PairedRule kPairedRule{.outputs_percent = 120,
                                        .reason = {"workers that have several segments", "experiments/h200-paired.jsonl"}};

/// The rows of one architecture.
struct ArchitectureRows {
  Architecture architecture = Architecture::kSm80;
  const KernelRow* first = nullptr;
  std::size_t count = 0;

  [[nodiscard]] constexpr const KernelRow* begin() const noexcept { return first; }
  [[nodiscard]] constexpr const KernelRow* end() const noexcept { return first + count; }
};

/// The newest first: where two serve a call, the newer does.
inline constexpr ArchitectureRows kKernelRows[] = {{Architecture::kSm90, rows::kSm90, std::size(rows::kSm90)},
                                                   {Architecture::kSm80, rows::kSm80, std::size(rows::kSm80)}};

/// Rows of wide kernels, which a build may leave out (LEAN_CUDA_WIDE): kKernelRows serves every call without them.
inline constexpr ArchitectureRows kWideRows{Architecture::kSm90, rows::kWide90, std::size(rows::kWide90)};

/// A family shares a translation unit: one type (or both fp8 types) and head dimension, every row of them.
struct KernelFamily {
  DType dtype = DType::kFloat16;
  std::int32_t head_dim = 0;

  [[nodiscard]] constexpr bool has(const KernelRow& row) const noexcept {
    const bool factors = !traits_of(row.scope).converts || dtype == DType::kFloat16;  // of any fp8
    return row.head_dim == head_dim && row.kv_bytes == kv_type_of(dtype).bytes && factors;
  }
  /// K and V of this type are served.
  [[nodiscard]] constexpr bool takes(DType kv_dtype) const noexcept { return kernels_of(kv_dtype) == dtype; }
};

inline constexpr std::int32_t kHeadDims[] = {64, 128, 256};
static_assert(*std::prev(std::end(kHeadDims)) == kWidestCudaHead, "what embeddings are told");

struct NamedFamily {
  std::string_view name;
  KernelFamily family;
};

/// The families by the names that the build has for them (CMakeLists.txt).
inline constexpr NamedFamily kFamilies[] = {
    {"f16_d64", {DType::kFloat16, 64}},    {"f16_d128", {DType::kFloat16, 128}},    {"f16_d256", {DType::kFloat16, 256}},
    {"bf16_d64", {DType::kBFloat16, 64}},  {"bf16_d128", {DType::kBFloat16, 128}},  {"bf16_d256", {DType::kBFloat16, 256}},
    {"fp8_d64", {DType::kFloat8E4M3, 64}}, {"fp8_d128", {DType::kFloat8E4M3, 128}}, {"fp8_d256", {DType::kFloat8E4M3, 256}}};

/// Families that have wide rows and no others. Without LEAN_CUDA_WIDE their calls are a wider family's, and the plain kernel's where
/// there is none.
inline constexpr NamedFamily kWideFamilies[] = {{"f16_d96", {DType::kFloat16, 96}},   {"bf16_d96", {DType::kBFloat16, 96}},
                                                {"f16_d192", {DType::kFloat16, 192}}, {"bf16_d192", {DType::kBFloat16, 192}},
                                                {"f16_d576", {DType::kFloat16, 576}}, {"bf16_d576", {DType::kBFloat16, 576}}};

/// A name that no family has does not compile.
[[nodiscard]] consteval KernelFamily family_named(std::string_view name) {
  for (const NamedFamily& known : kFamilies) {
    if (known.name == name) return known.family;
  }
  for (const NamedFamily& known : kWideFamilies) {
    if (known.name == name) return known.family;
  }
  throw "no such family";
}

/// The row's variant for one type of its kind.
[[nodiscard]] constexpr KernelConfig config_of(Architecture architecture, const KernelRow& row, DType dtype) noexcept {
  return {.architecture = architecture,
          .dtype = dtype,
          .head_dim = row.head_dim,
          .q_rows = row.q_rows,
          .tile_tokens = row.tile_tokens,
          .consumer_warps = row.consumer_warps,
          .scope = row.scope};
}

/// A warp of a wide kernel has 16 rows of all tokens, or where factors are swapped all rows of 16 tokens, a product 16 dims of a row of K,
/// and where values are shared out a warpgroup whole columns of 128 bytes of theirs.
[[nodiscard]] constexpr bool wide_rows_hold() noexcept {
  for (const KernelRow& row : kWideRows) {
    const KernelConfig config = config_of(kWideRows.architecture, row, DType::kFloat16);
    const bool rows = config.swaps_ab()
                          ? row.q_rows % (2 * kNarrowRows) == 0 && row.consumer_warps == 4
                          : row.q_rows * config.value_warps() == kMmaRows * row.consumer_warps && row.consumer_warps == 8;
    const bool turns = !config.in_turns() || (config.latent() && config.part_column(2) > config.part_column(1));
    const bool columns = row.head_dim % kMmaDims == 0 && row.tile_tokens % kMmaTokens == 0 &&
                         (config.value_warps() == 1 || config.summed_dims() * row.kv_bytes % (128 * config.value_warps()) == 0) &&
                         config.summed_dims() <= row.head_dim;
    if (!config.wide() || config.token_warps() != 1 || !rows || !columns || !turns) return false;
  }
  return true;
}
static_assert(wide_rows_hold());

/// The variant that a kernel's name says.
[[nodiscard]] constexpr KernelConfig config_of(Architecture architecture, const KernelFamily& family, std::int32_t q_rows,
                                               Scope scope) noexcept {
  const auto is_asked_for = [&](const KernelRow& row) { return family.has(row) && row.q_rows == q_rows && row.scope == scope; };
  for (const ArchitectureRows& table : kKernelRows) {
    for (const KernelRow& row : table) {
      if (table.architecture == architecture && is_asked_for(row)) return config_of(architecture, row, family.dtype);
    }
  }
  for (const KernelRow& row : kWideRows) {
    if (is_asked_for(row)) return config_of(kWideRows.architecture, row, family.dtype);
  }
  return {};
}

/// Roundings of a warp's running sums for each tile of a variant, at most: of every kMmaTokens tokens that it takes, a lane adds 4
/// weights to l, one by one; O takes their products at once, by an addition that truncates, which counts twice (docs/numerics.md).
[[nodiscard]] constexpr std::int32_t sum_roundings(const tile::TileConfig& tile) noexcept {
  std::int32_t runs = 1;
  const auto look_at = [&](const ArchitectureRows& table) {
    for (const KernelRow& row : table) {
      const bool serves = row.kv_bytes == bytes_of(tile.kv_dtype) && row.head_dim == tile.head_dim && row.q_rows == tile.q_rows &&
                          row.tile_tokens == tile.tile_tokens;
      if (serves) runs = max_of(runs, config_of(table.architecture, row, tile.kv_dtype).warp_runs());
    }
  };
  for (const ArchitectureRows& table : kKernelRows) look_at(table);
  look_at(kWideRows);
  return 4 * runs;
}
/// Roundings of the products of one matrix product among themselves, truncations all.
inline constexpr std::int32_t kProductRoundings = 2 * kMmaTokens;

/// Whether a call of chunks is a decode step must not show in its bits: both scopes' rows have the same tiles.
[[nodiscard]] constexpr bool chunks_have_same_tiles() noexcept {
  for (const KernelRow& step : rows::kSm90) {
    if (step.scope != Scope::kChunkStep) continue;
    for (const KernelRow& any : rows::kSm80) {
      const bool alike = any.kv_bytes == step.kv_bytes && any.head_dim == step.head_dim && any.q_rows == step.q_rows;
      if (alike && any.tile_tokens != step.tile_tokens) return false;
    }
  }
  return true;
}
static_assert(chunks_have_same_tiles());

}  // namespace lean::cuda

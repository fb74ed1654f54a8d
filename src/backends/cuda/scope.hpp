// Scope: what calls of a variant may ask. Nearly all calls of a server are decode steps that ask for nothing rare, and in short
// ones every instruction and register counts, so these have variants whose code holds nothing else. A scope is the traits below and
// nothing besides: the kernel compiles what they say, and the host chooses by them.
#pragma once

#include <cstdint>

namespace lean::cuda {

/// The values stand in the kernels' names.
enum class Scope : std::int32_t {
  kDecodeStep,
  kStridedStep,
  kTensorStep,
  kChunkStep,
  kAnyCall,
  kWideTile,
  kLatentTile,
  kExchangedStep,
  kFewValuesTile,
  kLatentTurns,
  kLatentFp8Tile,
  kLatentSwapped,
  kLatentFp8Swapped,
  kBesideStep,
  kPairedStep,
  kPairedTensorStep,
  kRuledStep,
  kWideFp8Tile,
  kWideRuledTile,
};
inline constexpr Scope kScopes[] = {Scope::kDecodeStep,       Scope::kStridedStep, Scope::kTensorStep,    Scope::kChunkStep,
                                    Scope::kAnyCall,          Scope::kWideTile,    Scope::kLatentTile,    Scope::kExchangedStep,
                                    Scope::kFewValuesTile,    Scope::kLatentTurns, Scope::kLatentFp8Tile, Scope::kLatentSwapped,
                                    Scope::kLatentFp8Swapped, Scope::kBesideStep,  Scope::kPairedStep,    Scope::kPairedTensorStep,
                                    Scope::kRuledStep,        Scope::kWideFp8Tile, Scope::kWideRuledTile};

/// Dims of the values of a latent tile: of the 576 of DeepSeek's keys all but the 64 that are turned (arXiv 2405.04434, sec. 2.1), and
/// of a tile of few values, whose keys have 64 more in the prefill of the same models.
inline constexpr std::int32_t kLatentValueDim = 512;
inline constexpr std::int32_t kFewValueDim = 128;

/// How K and V come into a stage of the ring.
enum class Copies : std::int32_t {
  kRuns,           // bulk copies (TMA) take whole tiles, or what a page holds of them: tokens of a head lie end to end
  kBoxes,          // tensor copies (TMA), and threads where these cannot
  kThreads,        // threads take pieces of rows, or with ScopeTraits::converts convert them
  kRunsOrThreads,  // as the call allows
};

/// How a tile lies in a stage.
enum class StageOrder : std::int32_t {
  kRows,     // row by row, end to end
  kColumns,  // as tensor copies lay it down: a column's bytes of every row, ready to be read
};

/// Dims of the call's heads beside the variant's.
enum class Dims : std::int32_t {
  kWhole,     // as many
  kFilledUp,  // fewer are filled up with zeros in a stage
  kFewer,     // fewer leave the rest of a row unused, which is selected away
};

/// fixed_chunk.
enum class Chunks : std::int32_t { kNever, kAlways, kAsAsked };

struct ScopeTraits {
  const char* name = "";  // in the build's report and the documents
  /// Flat lines (schedule/flat_line.hpp) and the last arriver only, and no rule of scores but windows and causality, which no tile
  /// pays for. Else whatever is asked.
  bool step = false;
  /// A step, or a wide tile, that has all rules of scores, in registers (kernel/tile/lane_rules.cuh).
  bool ruled = false;
  /// Products of whole warpgroups (ptx/warpgroup.cuh), which sm_90a alone has: of many rows, or with `step` too of few. Any line, or that of
  /// a step, and the last arriver only, and of the rules of scores windows, causality and, not in a step, softcap, unless it is ruled.
  bool wide = false;
  /// Values are the first dims of keys, in the same memory (multi-head latent attention): a tile is one stage, and where there are two
  /// warpgroups they have the same rows and half the values' dims each.
  bool latent = false;
  /// The warpgroups of a latent kernel make the weights of whole tiles in turn, not of half a tile each.
  bool in_turns = false;
  /// Of few rows: tokens, and dims of the values, are the 64 rows of a product, and query rows its columns ("swap AB"), so that none of
  /// these is multiplied for nothing; one warpgroup has them all (kernel/tile/swapped_tile.cuh).
  bool swaps_ab = false;
  /// K and V are fp8 and the variant's type, fp16, is that of the factors: producer threads convert rows on their way to a stage
  /// (kernel/load/converted_rows.cuh), and consumers bf16 queries where they lie (kernel/tile/bf16_queries.hpp).
  bool converts = false;
  std::int32_t value_dim = 0;  // widest dv, where it is less than the variant's head_dim
  Copies copies = Copies::kRunsOrThreads;
  StageOrder stage = StageOrder::kRows;
  Dims dims = Dims::kFewer;
  Chunks chunks = Chunks::kNever;
  bool warms_l2 = false;            // sends for its first read before there is a plan (kernel/plan/l2_warming.cuh)
  std::int32_t producer_warps = 2;  // a CTA gets its registers for four warps at a time
  /// One more warp finds out who shares outputs; else a producer does, once a segment's first tiles are under way.
  bool contributors_warp = false;
  /// CTAs of a multiprocessor, each of them a worker. Of two, one's tiles are read and computed while the other ends a segment: for calls
  /// of so many outputs that workers have several segments (kPairedRule).
  std::int32_t ctas = 1;
  /// Runs beside the launch of the call's chunks, and never else: on which of the workers follows from all lengths, which are counted before
  /// anything else (kernel/plan/side_workers.cuh).
  bool beside = false;
  /// Finished rows go to every rank of an exchange, and what all of them sent becomes the output, in the same launch
  /// (kernel/output/exchange.cuh).
  bool exchanges = false;
};

/// Of a latent scope.
[[nodiscard]] constexpr ScopeTraits latent_traits_of(Scope scope) noexcept {
  const bool turns = scope == Scope::kLatentTurns;
  const bool swaps = scope == Scope::kLatentSwapped || scope == Scope::kLatentFp8Swapped;
  const bool converts = scope == Scope::kLatentFp8Tile || scope == Scope::kLatentFp8Swapped;
  return {.name = turns      ? "turns"
                  : swaps    ? (converts ? "swapped8" : "swapped")
                  : converts ? "latent8"
                             : "latent",
          .step = swaps,
          .wide = true,
          .latent = true,
          .in_turns = turns,
          .swaps_ab = swaps,
          .converts = converts,
          .value_dim = kLatentValueDim,
          .copies = converts ? Copies::kThreads : Copies::kBoxes,
          .stage = StageOrder::kColumns,
          .dims = Dims::kWhole,
          .warms_l2 = swaps && !converts,
          .producer_warps = 4};
}

/// Of a tile of many rows that is not latent.
[[nodiscard]] constexpr ScopeTraits wide_traits_of(Scope scope) noexcept {
  const bool ruled = scope == Scope::kWideRuledTile;
  const bool converts = scope == Scope::kWideFp8Tile;
  const bool few_values = scope == Scope::kFewValuesTile;
  return {.name = ruled        ? "wide-ruled"
                  : converts   ? "wide8"
                  : few_values ? "values"
                               : "wide",
          .ruled = ruled,
          .wide = true,
          .converts = converts,
          .value_dim = few_values ? kFewValueDim : 0,
          .copies = converts ? Copies::kThreads : Copies::kBoxes,
          .stage = StageOrder::kColumns,
          .dims = converts ? Dims::kWhole : Dims::kFilledUp,
          .producer_warps = 4};
}

/// Of a decode step whose tokens lie end to end, and of one whose tiles come in columns. With two CTAs to a multiprocessor each has half
/// the warps. Here as below what is returned is one expression: of a value that is changed on the way, device code is not told that it is
/// a constant.
[[nodiscard]] constexpr ScopeTraits runs_traits_of(Scope scope) noexcept {
  const bool paired = scope == Scope::kPairedStep;
  return {.name = paired ? "paired" : "step",
          .step = true,
          .copies = Copies::kRuns,
          .dims = Dims::kWhole,
          .warms_l2 = true,
          .producer_warps = 1,
          .ctas = paired ? 2 : 1};
}
[[nodiscard]] constexpr ScopeTraits tensor_traits_of(Scope scope) noexcept {
  const bool paired = scope == Scope::kPairedTensorStep;
  const bool ruled = scope == Scope::kRuledStep;
  return {.name = paired  ? "paired-tensor"
                  : ruled ? "ruled"
                          : "tensor",
          .step = true,
          .ruled = ruled,
          .copies = Copies::kBoxes,
          .stage = StageOrder::kColumns,
          .dims = Dims::kFilledUp,
          .warms_l2 = true,
          .producer_warps = paired ? 2 : 4,
          .ctas = paired ? 2 : 1};
}

[[nodiscard]] constexpr ScopeTraits traits_of(Scope scope) noexcept {
  switch (scope) {
    case Scope::kDecodeStep:
    case Scope::kPairedStep: return runs_traits_of(scope);
    case Scope::kStridedStep:
      return {.name = "strided", .step = true, .copies = Copies::kThreads, .dims = Dims::kWhole, .producer_warps = 8};
    case Scope::kTensorStep:
    case Scope::kPairedTensorStep:
    case Scope::kRuledStep: return tensor_traits_of(scope);
    case Scope::kChunkStep:
      return {.name = "chunk",
              .step = true,
              .copies = Copies::kRuns,
              .dims = Dims::kWhole,
              .chunks = Chunks::kAlways,
              .warms_l2 = true,
              .producer_warps = 1};
    case Scope::kBesideStep:  // chunks that it runs beside have tensor copies too
      return {.name = "beside",
              .step = true,
              .copies = Copies::kBoxes,
              .stage = StageOrder::kColumns,
              .dims = Dims::kFilledUp,
              .producer_warps = 4,
              .beside = true};
    case Scope::kExchangedStep:
      return {.name = "exchanged",
              .step = true,
              .copies = Copies::kRuns,
              .dims = Dims::kWhole,
              .warms_l2 = true,
              .producer_warps = 1,
              .exchanges = true};
    case Scope::kWideTile:
    case Scope::kWideRuledTile:
    case Scope::kWideFp8Tile:
    case Scope::kFewValuesTile: return wide_traits_of(scope);
    case Scope::kLatentTile:
    case Scope::kLatentTurns:
    case Scope::kLatentFp8Tile:
    case Scope::kLatentSwapped:
    case Scope::kLatentFp8Swapped: return latent_traits_of(scope);
    case Scope::kAnyCall: break;
  }
  return {.name = "any", .chunks = Chunks::kAsAsked, .contributors_warp = true};
}

}  // namespace lean::cuda

// DeviceCall: everything one launch needs, passed by value (__grid_constant__). launch.cpp fills it; each of the kernel's
// stages reads its own part, and all of them the problem. docs/glossary.md has the letters.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "base/int_math.hpp"
#include "fixup/workspace.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "problem/pages.hpp"
#include "problem/sequence.hpp"
#include "schedule/even_line.hpp"
#include "schedule/even_stair.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/side_by_side.hpp"
#include "timeline/timeline.hpp"

namespace lean::cuda {

/// Sequences that a launch serves, by their query tokens (call_plan.cpp: few_tokens_of()).
struct QueryRange {
  std::int32_t least = 0;
  std::int32_t most = INT32_MAX;

  [[nodiscard]] LEAN_HD constexpr bool has(std::int32_t q_tokens) const noexcept { return least <= q_tokens && q_tokens <= most; }
};

enum class Pass : std::int32_t { kWhole, kMergeOnly };  // kMergeOnly: Fixup::kTwoKernels' second launch

/// row * group_inverse >> this is row / group while row * group < 2^this, since the rounding adds less than 1 / group to it.
inline constexpr std::int32_t kGroupInverseBits = 16;
/// output * kv_heads_inverse >> this is output / kv heads in the same way, for outputs of an even line, of which there are 1024 at
/// most (kMaxWorkers).
inline constexpr std::int32_t kOutputInverseBits = 20;

/// Where rows of K or V lie: what the first copy needs of a tensor, side by side, since constants come line by line.
struct KvRows {
  const std::byte* first = nullptr;
  Strides bytes;  // not elements
};

[[nodiscard]] inline KvRows kv_rows_of(const TensorView& tensor) noexcept {
  const std::int64_t element = bytes_of(tensor.dtype);
  const Strides& elements = tensor.strides;
  return {static_cast<const std::byte*>(tensor.data),
          {.sequence = elements.sequence * element,
           .head = elements.head * element,
           .token = elements.token * element,
           .dim = element}};
}

/// Shares as they would be if all sequences were alike, for the first read (plan/early_tile.hpp). In floating point, since a place
/// need be near only; what is read is held to what exists.
struct AlikeShares {
  float outputs_a_worker = 0.0F;
  float sequences_an_output = 0.0F;  // 1 / kv heads
};

/// Shares where all sequences are alike; `outputs`: kv heads of all sequences.
[[nodiscard]] constexpr AlikeShares alike_shares(std::int64_t outputs, std::int32_t kv_heads, std::int32_t workers) noexcept {
  return {.outputs_a_worker = static_cast<float>(outputs) / static_cast<float>(workers),
          .sequences_an_output = 1.0F / static_cast<float>(kv_heads)};
}

/// plan: what is known of the line before the lengths are, and of where its segments may be cut.
struct PlanArgs {
  bool flat = false;                  // walked in 32 bits: flat whatever the lengths, of many rows schedule::is_stair()
  bool short_line = false;            // flat, and built by warps
  bool cumulative = false;            // lengths are, of some kind
  bool spares_workers = true;         // cuda::spares_workers()
  schedule::EvenLine even;            // of a short line
  std::int32_t kv_heads_inverse = 0;  // 2^kOutputInverseBits / kv heads, rounded up
  AlikeShares alike;                  // for warm_l2()
  QueryRange queries;                 // sequences of this launch
  Policy policy;                      // how the line is dealt out
  std::int32_t chunk_tiles = 0;       // fixed_chunk: tiles of a chunk; else 0
};

/// load: how K, V and queries come into shared memory. The first copy needs its rows and the ring's sizes.
struct LoadArgs {
  KvRows k_rows;
  KvRows v_rows;
  std::int32_t ring_stages = 0;           // a K or V tile each
  std::int32_t stage_bytes = 0;           // from one to the next
  std::int32_t copy_bytes = kPieceBytes;  // what threads copy of K and V at once: 16, 8, 4 or 1
  std::int32_t box_tokens = 0;            // of a tall box (tensor_map.hpp); 0: no tensor copies
  std::int32_t page_shift = -1;           // log2 of a page's tokens, where that is a whole number
  bool bulk_copies = false;     // tokens of a head lie end to end: bulk copies take whole tiles, or what of them a page holds
  bool vector_queries = false;  // eight neighbouring queries may be loaded at once
  bool query_boxes = false;     // tensor copies bring the queries of a wide kernel's row block
};

/// tile: what becomes of a LeanTile's scores.
struct TileArgs {
  float log2_scale = 0.0F;    // of scores, times log2(e)
  bool score_rules = false;   // every tile has some: softcap, ALiBi, a mask, or a window whose left end differs from row to row
  bool may_rule = false;      // a tile may have some: those, a tree mask, or pages, which may lie outside the pool
  bool hides_values = false;  // a mask, or a window that begins inside a tile, hides tokens: what V holds there must reach nobody
};

/// output: how finished rows are written.
struct OutputArgs {
  bool vector_output = false;  // four neighbouring elements may be stored at once
  bool piece_output = false;   // the same of eight
};

/// fixup: who merges an output's partials, and where they lie.
struct FixupArgs {
  Fixup kind = Fixup::kLastArriver;
  Pass pass = Pass::kWhole;
  fixup::Slots slots;
};

/// What runs ahead of this launch on its stream, and may still run, and whether another launch of the call runs beside it. Of two side by
/// side the chunks' waits for all that is ahead of both before it lets the steps' start, which waits for nothing before its end
/// (plan/side_workers.cuh).
struct LaunchArgs {
  bool dependent = false;  // the call may overlap what is ahead of it on the stream, and what comes after it
  bool follows_append =
      false;            // a dependent of the kernel that appends (append.hpp), which starts it when all ahead of both has ended
  bool beside = false;  // DeviceCall::sides says with whom

  /// Before it reads anything.
  [[nodiscard]] constexpr bool waits() const noexcept { return dependent && !follows_append; }
};

/// What calls of many rows alone have.
struct StairArgs {
  Divisor group;                  // of packed rows, which may be more than group_inverse is for
  schedule::EvenStair even;       // of a short line
  schedule::ShortStairStep step;  // how a row block's tiles grow
  std::int32_t most_outputs = 0;  // for so many 32 bits hold every sum
};

/// Nested by stage, so that what one of them reads lies on few lines of constants: a line that nobody has read yet is some 0.1 us away, and
/// a decode step's first copy waits for every one of its own. These are the first two, those of the lengths, and two that hold heads, launch
/// and plan (tests/cuda_host/device_call_test.cpp); what few calls ask for lies behind all that.
struct DeviceCall {
  LoadArgs load;
  Problem problem;                 // what is asked; a launch of part of the sequences has the whole problem
  schedule::LineShape shape;       // heads, group, tiles and row blocks
  std::int32_t group_inverse = 0;  // 2^kGroupInverseBits / group, rounded up
  LaunchArgs launch;
  PlanArgs plan;
  TileArgs tile;
  OutputArgs output;
  FixupArgs fixup;
  StairArgs stair;
  schedule::SideBySide sides;  // with the call's other launch
#ifdef LEAN_TIMELINE           // not an empty member that has no address: nvcc 13.0 doubles a parameter with one
  timeline::Target timeline;   // where workers record
#endif
};

}  // namespace lean::cuda

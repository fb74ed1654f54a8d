// DeviceCall: everything one launch needs, passed by value.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/plan/early_tile.hpp"
#include "backends/cuda/kernel_config.hpp"
#include "fixup/workspace.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"
#include "problem/pages.hpp"
#include "problem/sequence.hpp"
#include "schedule/even_line.hpp"
#include "schedule/flat_line.hpp"
#include "schedule/segments.hpp"

namespace lean::cuda {

/// Sequences that a launch serves, by their query tokens (cuda_backend.cpp: shares_of()).
struct QueryRange {
  std::int32_t least = 0;
  std::int32_t most = INT32_MAX;

  [[nodiscard]] LEAN_HD constexpr bool has(std::int32_t q_tokens) const noexcept { return least <= q_tokens && q_tokens <= most; }
};

/// Lengths as the kernel reads them: a value that had to be clamped leaves a sticky code in the workspace, and a sequence that another
/// launch serves has no queries.
template <bool kCumulative>
class BasicDeviceLengths {
 public:
  LEAN_HD BasicDeviceLengths(const Problem& problem, const QueryRange& queries, fixup::StateHeader* header) noexcept
      : source_(problem), queries_(queries), header_(header) {}

  LEAN_HD Sequence operator()(std::int64_t sequence) const noexcept {
    const Sequence lengths = unreported(sequence);
    report(lengths);
    return lengths;
  }

  /// The same in two steps: whoever reads several stores nothing before all are asked for.
  LEAN_HD Sequence unreported(std::int64_t sequence) const noexcept {
    Sequence lengths = source_(sequence);
    if (kCumulative && !queries_.has(lengths.q_tokens)) lengths.q_tokens = 0;
    return lengths;
  }
  LEAN_HD void report(const Sequence& lengths) const noexcept {
    if (lengths.clamped && header_->sticky_code == 0) {
      header_->sticky_code = static_cast<fixup::Counter>(StatusCode::kBadLengths);
    }
  }

 private:
  BasicLengthSource<kCumulative> source_;
  QueryRange queries_;
  fixup::StateHeader* header_;
};

using DeviceLengths = BasicDeviceLengths<true>;

/// Any line, and the flat line that every decode step has (schedule/flat_line.hpp).
using DeviceLine = schedule::WorkLine<DeviceLengths>;
using DeviceCursor = schedule::SegmentCursor<DeviceLengths>;
template <KernelConfig kConfig, bool kCumulative>
using FlatRules = schedule::LineRules<BasicDeviceLengths<kCumulative>, std::int32_t, schedule::OneBlockShape<kConfig.tile_tokens>>;
using FlatPlan = schedule::BasicPlan<std::int32_t>;
using FlatRange = schedule::BasicShares<std::int32_t>::Range;
using FlatStart = schedule::SequencePlace<std::int32_t>;

/// A plan, and a sequence that begins at or before the worker's share. Of an even line the worker's part of one output, and its sequence.
struct FlatLine {
  FlatPlan plan;
  FlatRange share;  // this worker's
  FlatStart start;
  Sequence lengths;  // of that sequence
  schedule::EvenShare even;
};

/// A flat line of up to a sequence a lane is built by each warp that walks it, for itself, and where it may be even, of up to so many a lane;
/// any other is summed by the whole CTA.
inline constexpr std::int32_t kLaneSequences = 4;

enum class Pass : std::int32_t { kWhole, kMergeOnly };  // kMergeOnly: Fixup::kTwoKernels' second launch

/// row * group_inverse >> this is row / group while row * group < 2^this, since the rounding adds less than 1 / group to it.
inline constexpr std::int32_t kGroupInverseBits = 16;
/// Likewise for outputs and kv heads of an even line, of which there are 1024 at most (kMaxWorkers).
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

struct DeviceCall {
  KvRows k_rows;
  KvRows v_rows;
  Problem problem;
  QueryRange queries;
  schedule::LineShape shape;
  Policy policy;
  Fixup fixup = Fixup::kLastArriver;
  Pass pass = Pass::kWhole;
  fixup::Slots slots;
  float log2_scale = 0.0F;
  std::int32_t group_inverse = 0;     // 2^kGroupInverseBits / group, rounded up
  schedule::EvenLine even;            // of a short line
  std::int32_t kv_heads_inverse = 0;  // 2^kOutputInverseBits / kv heads, rounded up
  AlikeShares alike;                  // for warm_l2()
  std::int32_t ring_stages = 0;
  std::int32_t stage_bytes = 0;
  std::int32_t copy_bytes = kPieceBytes;  // what threads copy of K and V at once: 16, 8, 4 or 1
  std::int32_t box_tokens = 0;            // of a tall box (tensor_map.hpp); 0: no tensor copies
  std::int32_t chunk_tiles = 0;           // fixed_chunk: tiles of a chunk; else 0
  std::int32_t page_shift = -1;           // log2 of a page's tokens, where that is a whole number
  bool flat = false;                      // walked by a FlatCursor: flat whatever the lengths, and fits schedule::narrow_units()
  bool short_line = false;                // flat, and built by warps
  bool cumulative = false;                // lengths are, of some kind
  bool bulk_copies = false;     // tokens of a head lie end to end: the copy engine takes whole tiles, or what of them a page holds
  bool score_rules = false;     // every tile has some: softcap, ALiBi, a mask, or a window whose left end differs from row to row
  bool may_rule = false;        // a tile may have some: those, a tree mask, or pages, which may lie outside the pool
  bool hides_values = false;    // a mask, or a window that begins inside a tile, hides tokens: what V holds there must reach nobody
  bool vector_queries = false;  // eight neighbouring queries may be loaded at once
  bool vector_output = false;   // four neighbouring outputs may be stored at once
  bool dependent_launch = false;
  bool follows_append = false;  // launched as a dependent of the kernel that appends (append.hpp)
};

/// Which of the sequence's pages holds a token.
[[nodiscard]] LEAN_HD inline std::int32_t page_of(const DeviceCall& call, std::int32_t token) noexcept {
  return call.page_shift >= 0 ? token >> call.page_shift : quotient(token, call.problem.pages.page_tokens);
}

/// Pages below this are copied row by row: copies that a warp's lanes ask the copy engine for go one after the other, 60 cycles each.
inline constexpr std::int32_t kMinRunBytes = 2048;
inline constexpr std::int32_t kMinStepRunBytes =
    8192;  // shorter pages, and rows with gaps, come in boxes in a decode step, where they can

/// Rows of pages of so many tokens are copied page by page; of shorter ones, looked up a lane a row (docs/cuda-backend.md has figures).
inline constexpr std::int32_t kMinPageRows = 64;

/// By the copy engine more in flight brings no bandwidth (docs/cuda-backend.md), less where pages lie apart, and whatever else asks the
/// memory for something waits longer. Copies by threads take all there is.
inline constexpr std::int32_t kEngineRingBytes = 96 * 1024;

/// Of a ring.
[[nodiscard]] constexpr std::int32_t max_stages(const KernelConfig& config) noexcept {
  if (!config.bulk_step()) return 16;
  return kEngineRingBytes / (config.tile_tokens * config.stage_row_bytes(config.head_dim));
}

}  // namespace lean::cuda

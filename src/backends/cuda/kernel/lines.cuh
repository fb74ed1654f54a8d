// The work line as the device holds it: lengths from device memory, and the types of the walks: the general one in 64 bits, and
// those in 32, which every decode step has and nearly every call of many rows. kernel/plan builds and walks them; shared memory has
// room for both while they are built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/ptx/relaxed.cuh"
#include "backends/cuda/sticky.cuh"
#include "problem/sequence.hpp"
#include "schedule/even_line.hpp"
#include "schedule/flat_line.hpp"
#include "schedule/segments.hpp"
#include "schedule/stair_line.hpp"
#include "schedule/work_line.hpp"

namespace lean::cuda {

/// Loads a word that an earlier kernel may be writing: past the L1, which would go on having what was there before.
struct PastL1 {
  [[nodiscard]] LEAN_HD static std::int32_t load(const std::int32_t* at) noexcept { return ptx::load_relaxed(at); }
};

/// Lengths as the kernel reads them: a value that had to be clamped leaves a sticky code in the workspace, and a sequence that
/// another launch serves has no queries.
template <bool kCumulative>
class BasicDeviceLengths {
 public:
  __device__ BasicDeviceLengths(const Problem& problem, const QueryRange& queries, fixup::StateHeader& header) noexcept
      : source_(problem), queries_(queries), header_(&header) {}

  __device__ Sequence operator()(std::int64_t sequence) const noexcept {
    const Sequence lengths = unreported(sequence);
    if (lengths.clamped) report();
    return lengths;
  }

  /// For whoever reads several, and reports what was clamped once all are there.
  __device__ Sequence unreported(std::int64_t sequence) const noexcept {
    Sequence lengths = source_(sequence);
    if (kCumulative && !queries_.has(lengths.q_tokens)) lengths.q_tokens = 0;
    return lengths;
  }
  __device__ void report() const noexcept { report_sticky(*header_, StatusCode::kBadLengths); }

 private:
  BasicLengthSource<kCumulative> source_;
  QueryRange queries_;
  fixup::StateHeader* header_;
};

using DeviceLengths = BasicDeviceLengths<true>;

/// Any line; and in 32 bits the flat line that every decode step has (schedule/flat_line.hpp), or of many rows the stair line
/// (schedule/stair_line.hpp), which is built and walked as flat ones are, by rules and a cursor of its own.
using DeviceLine = schedule::WorkLine<DeviceLengths>;
using DeviceCursor = schedule::SegmentCursor<DeviceLengths>;
template <KernelConfig kConfig>
using FlatShape = std::conditional_t<kConfig.stairs(), schedule::StairShape<kConfig.q_rows, kConfig.tile_tokens>,
                                     schedule::OneBlockShape<kConfig.tile_tokens>>;
template <KernelConfig kConfig, bool kCumulative>
using FlatRules = schedule::LineRules<BasicDeviceLengths<kCumulative>, std::int32_t, FlatShape<kConfig>>;
template <KernelConfig kConfig>
using FlatPlan = std::conditional_t<kConfig.stairs(), schedule::BasicStairPlan<std::int32_t>, schedule::BasicPlan<std::int32_t>>;
template <KernelConfig kConfig>
using FlatSums = FlatRules<kConfig, true>::Sums;
using FlatRange = schedule::BasicShares<std::int32_t>::Range;
using FlatStart = schedule::SequencePlace<std::int32_t>;

/// A plan, and a sequence that begins at or before the worker's share. Of an even line the worker's part of one output, and its
/// sequence.
template <KernelConfig kConfig>
struct FlatLine {
  FlatPlan<kConfig> plan;
  FlatRange share;  // this worker's
  FlatStart start;
  Sequence lengths;  // of that sequence
  schedule::EvenShare even;
};

/// The general line, its plan and their sums while they are built.
struct CtaLine {
  schedule::LineSums strip_rows[DeviceLine::kStrips / kWarpThreads];
  schedule::Plan plan;
  DeviceLine line;  // begun by one thread, built by all
};

/// A worker of many rows on its line: a stair line's plan and walk, or a general one's cursor and the segment that it found. One
/// thread's, and not in registers, of which producers have few.
struct CtaWalk {
  bool even;  // an even stair: `walk` has the worker's one segment, and nothing else of it or of `plan` is read
  schedule::BasicStairPlan<std::int32_t> plan;
  schedule::StairWalk<std::int32_t, Sequence> walk;
  alignas(DeviceCursor) std::byte general[sizeof(DeviceCursor)];
};

/// A flat line and its sums, where all threads build it.
template <KernelConfig kConfig>
struct CtaFlatLine {
  FlatSums<kConfig> warp_sums[cta_threads(kConfig) / kWarpThreads];
  FlatLine<kConfig> line;
};

}  // namespace lean::cuda

// The plain kernel (plain.hpp). Of each output, a block of packed rows of one kv head:
//
//   all     stage the queries as fp32, each dim of all rows side by side
//   a warp  takes runs of 32 tokens: scores, lanes side by side along the dims, after which each lane has those of a token of its own;
//           their rules; the online softmax; the weights times V, lanes along the dims again
//   all     merge the warps' (O, m, l) in the warps' order, a row at a time, and write the row
//
// Runs are counted from the sequence's first valid token, so a row's sums do not depend on which rows share its block.
#include "backends/cuda/plain.hpp"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "backends/cuda/device.hpp"
#include "backends/cuda/enqueue_kernel.hpp"
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/kernel/tile/score_rules.cuh"
#include "backends/cuda/ptx/fp8.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/sticky.cuh"
#include "base/message.hpp"
#include "base/with_type.hpp"
#include "output/rows.hpp"
#include "problem/address.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "schedule/line_shape.hpp"
#include "softmax/state.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kThreads = kPlainWarps * kWarpThreads;
constexpr std::int64_t kMostCtas = std::int64_t{1} << 20;  // each takes several outputs where there are more
constexpr int kTokensAtOnce = 4;                           // of a run, whose scores are computed side by side

static_assert(kPlainRunTokens == kWarpThreads);

/// Head dims come in slices, a dim a lane; kSlices is the most of them that a variant has.
template <int kSlices>
inline constexpr int kRows = plain_rows(kSlices * kWarpThreads);

/// A warp's run: where the rows of its tokens lie, null where a token is not there, and their weights for each row of the block.
template <int kSlices>
struct Run {
  const std::byte* k[kPlainRunTokens];
  const std::byte* v[kPlainRunTokens];
  alignas(16) float weights[kPlainRunTokens][kRows<kSlices>];
};

template <int kSlices>
struct PlainShared {
  static constexpr int kDims = kSlices * kWarpThreads;

  SegmentRecord output;                        // which sequence and kv head, how many rows, and what they see together
  PackedRow rows[kRows<kSlices>];              // which query each is
  alignas(16) float q[kDims][kRows<kSlices>];  // 0 past the rows and dims that there are
  softmax::State states[kRows<kSlices>][kPlainWarps];
  union {
    Run<kSlices> runs[kPlainWarps];
    float parts[kPlainWarps][kDims];  // O of one row
  };
};

[[nodiscard]] __device__ __forceinline__ std::int32_t this_lane() { return static_cast<std::int32_t>(threadIdx.x) % kWarpThreads; }
[[nodiscard]] __device__ __forceinline__ std::int32_t this_warp() { return static_cast<std::int32_t>(threadIdx.x) / kWarpThreads; }

/// The same sum in every lane.
[[nodiscard]] __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ptx::kAllLanes, x, lanes);
  return x;
}

/// The largest number; NaN only where all are.
[[nodiscard]] __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = kWarpThreads / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ptx::kAllLanes, x, lanes));
  return x;
}

template <DType kType>
[[nodiscard]] __device__ __forceinline__ float element_at(const std::byte* at) {
  if constexpr (kv_type_of(kType).scaled) {
    const std::uint32_t half = ptx::fp8_to_half<kType>(*reinterpret_cast<const std::uint8_t*>(at), false);
    return to_float<DType::kFloat16>(static_cast<std::uint16_t>(half));
  } else {
    return to_float<kType>(*reinterpret_cast<const std::uint16_t*>(at));
  }
}

[[nodiscard]] __device__ __forceinline__ float query_element(const TensorView& q, std::int64_t offset) {
  const std::uint16_t bits = static_cast<const std::uint16_t*>(q.data)[offset];
  return q.dtype == DType::kFloat16 ? to_float<DType::kFloat16>(bits) : to_float<DType::kBFloat16>(bits);
}

/// Which output the index stands for: row blocks of a head side by side, so that CTAs near each other read the same K and V. Called by
/// one thread, so that each length is read once; no rows: there are none.
__device__ void find_output(const DeviceCall& call, std::int64_t index, std::int32_t block_rows, SegmentRecord& output) {
  const Problem& problem = call.problem;
  const std::int64_t blocks = ceil_div(std::int64_t{problem.q_tokens} * call.shape.group, block_rows);
  const std::int64_t head = index / blocks;
  output.row_block = static_cast<std::int32_t>(index % blocks);
  output.sequence = head / problem.kv_heads;
  output.kv_head = static_cast<std::int32_t>(head % problem.kv_heads);
  output.lengths = DeviceLengths(problem, call.plan.queries, call.fixup.slots.header()).unreported(output.sequence);
  if (output.lengths.clamped) report_sticky(call.fixup.slots.header(), StatusCode::kBadLengths);
  const std::int64_t first = std::int64_t{output.row_block} * block_rows;
  const std::int64_t rows = std::int64_t{output.lengths.q_tokens} * call.shape.group - first;
  output.rows = static_cast<std::int32_t>(clamp_to(rows, 0, block_rows));
  if (output.rows == 0) return;
  const std::int32_t last_token = packed_row(first + output.rows - 1, call.shape.group).token;
  const KeySpan seen = visible_span(output.lengths, packed_row(first, call.shape.group).token, last_token, call.shape.reach);
  output.token_begin = seen.begin;
  output.token_end = seen.end;
}

/// Called by all threads.
template <int kSlices>
__device__ void stage_queries(const DeviceCall& call, PlainShared<kSlices>& shared) {
  const Problem& problem = call.problem;
  const SegmentRecord& output = shared.output;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < kRows<kSlices> * shared.kDims; i += kThreads) {
    const std::int32_t row = i / shared.kDims;
    const std::int32_t dim = i % shared.kDims;
    const PackedRow at = packed_row(std::int64_t{output.row_block} * kRows<kSlices> + row, call.shape.group);
    if (dim == 0) shared.rows[row] = at;
    float element = 0.0F;
    if (row < output.rows && dim < problem.head_dim) {
      const HeadPosition head{output.sequence, output.kv_head * call.shape.group + at.head_in_group};
      const std::int64_t first = q_offset(problem.q.strides, output.lengths, head, problem.cu_q_tokens != nullptr);
      element = query_element(problem.q, first + at.token * problem.q.strides.token + dim * problem.q.strides.dim);
    }
    shared.q[dim][row] = element;
  }
}

/// Finds the rows of the lane's own token. Whether it is there: seen by some row, and in a page of the pool.
template <int kSlices>
__device__ bool find_rows(const DeviceCall& call, const SegmentRecord& output, std::int64_t token, Run<kSlices>& run) {
  const Problem& problem = call.problem;
  const HeadPosition head{output.sequence, output.kv_head};
  const bool paged = is_paged(problem.pages);
  bool there = token >= output.token_begin && token < output.token_end;
  std::int32_t id = 0;       // of its page
  std::int64_t row = token;  // of the head, or of the page
  if (there && paged) {
    const std::int32_t page = page_of(call, static_cast<std::int32_t>(token));
    id = page_ids(problem.pages, output.lengths, output.sequence)[page];
    row = token - std::int64_t{page} * problem.pages.page_tokens;
    there = in_pool(problem.pages, id);
    if (!there) report_sticky(call.fixup.slots.header(), StatusCode::kBadPageIndex);
  }
  const auto row_of = [&](const TensorView& tensor) -> const std::byte* {
    if (!there) return nullptr;
    const Strides& strides = tensor.strides;
    const std::int64_t first =
        paged ? page_offset(strides, id, head.head) : kv_offset(strides, output.lengths, head, problem.cu_kv_tokens != nullptr);
    return static_cast<const std::byte*>(tensor.data) + (first + row * strides.token) * bytes_of(tensor.dtype);
  };
  run.k[this_lane()] = row_of(problem.k);
  run.v[this_lane()] = row_of(problem.v);
  return there;
}

/// q k of the lane's own token for each row, not yet scaled.
template <DType kType, int kSlices>
__device__ void dot_products(const Problem& problem, const PlainShared<kSlices>& shared, const Run<kSlices>& run,
                             float (&products)[kRows<kSlices>]) {
  const std::int64_t dim_bytes = problem.k.strides.dim * kv_type_of(kType).bytes;
  for (int first = 0; first < kPlainRunTokens; first += kTokensAtOnce) {
    float sums[kTokensAtOnce][kRows<kSlices>] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice * kWarpThreads >= problem.head_dim) break;
      const std::int32_t dim = slice * kWarpThreads + this_lane();
      const bool exists = dim < problem.head_dim;
#pragma unroll
      for (int i = 0; i < kTokensAtOnce; ++i) {
        const std::byte* const row = run.k[first + i];
        const float k = exists && row != nullptr ? element_at<kType>(row + dim * dim_bytes) : 0.0F;
#pragma unroll
        for (int r = 0; r < kRows<kSlices>; ++r) sums[i][r] = fmaf(shared.q[dim][r], k, sums[i][r]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
#pragma unroll
      for (int r = 0; r < kRows<kSlices>; ++r) {
        const float sum = warp_sum(sums[i][r]);
        if (this_lane() == first + i) products[r] = sum;
      }
    }
  }
}

/// The weight of a token that the row does not see: its V is left out. That of a token that is seen may underflow, to 0 without a
/// sign, and is multiplied like any other: 0 x NaN is NaN (docs/numerics.md).
constexpr float kUnseen = -0.0F;

[[nodiscard]] __device__ __forceinline__ bool is_seen(float weight) { return __float_as_uint(weight) != __float_as_uint(kUnseen); }

struct Score {
  float value = softmax::kNegInf;  // in the log2 domain, after the rules
  bool seen = false;               // by the row
};

/// The score of a row and the lane's own token.
template <int kSlices>
[[nodiscard]] __device__ Score score_of(const DeviceCall& call, const PlainShared<kSlices>& shared, float product, float scale,
                                        int row, std::int32_t token) {
  const SegmentRecord& output = shared.output;
  if (row >= output.rows) return {};
  const float bias = key_bias(call, output, shared.rows[row], token, false);
  if (bias == softmax::kNegInf) return {};
  return {.value = ruled_score(call, output, product * scale, shared.rows[row], token) + bias, .seen = true};
}

/// A warp's part of the block: what its runs come to.
template <DType kType, int kSlices>
struct WarpPart {
  softmax::State states[kRows<kSlices>];
  float o[kRows<kSlices>][kSlices] = {};

  /// Takes a run whose first token is `first`.
  __device__ void take(const DeviceCall& call, const PlainShared<kSlices>& shared, Run<kSlices>& run, std::int64_t first,
                       float scale) {
    const std::int64_t token = first + this_lane();
    const bool there = find_rows(call, shared.output, token, run);
    __syncwarp();
    float scores[kRows<kSlices>];
    dot_products<kType>(call.problem, shared, run, scores);
    float factors[kRows<kSlices>];  // of what there was
#pragma unroll
    for (int r = 0; r < kRows<kSlices>; ++r) {
      const Score score = there ? score_of(call, shared, scores[r], scale, r, static_cast<std::int32_t>(token)) : Score{};
      softmax::State& state = states[r];
      const float m = fmaxf(state.m, warp_max(score.value));
      const float weight = score.seen ? softmax::rescale_factor(score.value, m) : kUnseen;
      factors[r] = softmax::rescale_factor(state.m, m);
      state = {.m = m, .l = fmaf(state.l, factors[r], warp_sum(weight))};
      run.weights[this_lane()][r] = weight;
    }
    __syncwarp();
    add_values(call.problem, run, factors);
    __syncwarp();  // the next run takes this one's place
  }

  /// A run's weights times V, in a sum of their own that is then added. What V holds of a token reaches no row that does not see it.
  __device__ void add_values(const Problem& problem, const Run<kSlices>& run, const float (&factors)[kRows<kSlices>]) {
    const std::int32_t value_dim = value_dim_of(problem);
    const std::int64_t dim_bytes = problem.v.strides.dim * kv_type_of(kType).bytes;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice * kWarpThreads >= value_dim) break;
      const std::int32_t dim = slice * kWarpThreads + this_lane();
      const bool exists = dim < value_dim;
      float sums[kRows<kSlices>] = {};
#pragma unroll 8
      for (int i = 0; i < kPlainRunTokens; ++i) {
        const std::byte* const row = run.v[i];
        const float v = exists && row != nullptr ? element_at<kType>(row + dim * dim_bytes) : 0.0F;
#pragma unroll
        for (int r = 0; r < kRows<kSlices>; ++r) {
          const float weight = run.weights[i][r];
          if (is_seen(weight)) sums[r] = fmaf(weight, v, sums[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows<kSlices>; ++r) o[r][slice] = fmaf(o[r][slice], factors[r], sums[r]);
    }
  }
};

/// Merges the warps' parts of a row, in their order, and writes it. Called by all threads.
template <DType kType, int kSlices>
__device__ void write_row(const DeviceCall& call, const PlainShared<kSlices>& shared, int row) {
  const Problem& problem = call.problem;
  const SegmentRecord& output = shared.output;
  const PackedRow at = shared.rows[row];
  const HeadPosition head{output.sequence, output.kv_head};
  const float sink = output::row_sink(problem, call.shape.group, head, at);
  const std::int64_t first = output::row_offset(problem, call.shape.group, output.lengths, head, at);
  const std::int32_t value_dim = value_dim_of(problem);
  for (std::int32_t dim = static_cast<std::int32_t>(threadIdx.x); dim < value_dim; dim += kThreads) {
    softmax::State state = shared.states[row][0];
    float o = shared.parts[0][dim];
    for (int warp = 1; warp < kPlainWarps; ++warp) {
      const softmax::MergeStep step = softmax::merge_step(state, shared.states[row][warp]);
      o = softmax::merge_element(step, o, shared.parts[warp][dim]);
      state = step.merged;
    }
    const float scale = softmax::output_scale(state, sink);
    o *= scale;
    // 0 x inf is no number: an empty row is 0 whatever its scale.
    if (kv_type_of(kType).scaled && scale != 0.0F) o *= v_scale_of(problem, output.kv_head);
    static_cast<std::uint16_t*>(problem.o.data)[first + dim * problem.o.strides.dim] =
        problem.o.dtype == DType::kFloat16 ? from_float<Half>(o).bits : from_float<BFloat16>(o).bits;
    if (dim == 0) output::write_lse(problem, call.shape.group, output.lengths, head, at, state, sink);
  }
}

/// Computes the output that stands in `shared`. Called by all threads.
template <DType kType, int kSlices>
__device__ void compute(const DeviceCall& call, PlainShared<kSlices>& shared) {
  const SegmentRecord& output = shared.output;
  stage_queries(call, shared);
  __syncthreads();
  WarpPart<kType, kSlices> part;
  const float scale = call.tile.log2_scale * k_scale_of(call.problem, output.kv_head);
  const std::int32_t warp = this_warp();
  const std::int64_t begin = output.lengths.kv_begin;
  const std::int64_t first_round = (output.token_begin - begin) / kPlainRoundTokens;
  for (std::int64_t token = begin + first_round * kPlainRoundTokens + warp * kPlainRunTokens; token < output.token_end;
       token += kPlainRoundTokens) {
    if (token + kPlainRunTokens <= output.token_begin) continue;
    part.take(call, shared, shared.runs[warp], token, scale);
  }
#pragma unroll
  for (int r = 0; r < kRows<kSlices>; ++r) {
    if (r >= output.rows) break;
    __syncthreads();  // runs, or the row before, are over
    if (this_lane() == 0) shared.states[r][warp] = part.states[r];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) shared.parts[warp][slice * kWarpThreads + this_lane()] = part.o[r][slice];
    __syncthreads();
    write_row<kType>(call, shared, r);
  }
}

template <DType kType, int kSlices>
__global__ void __launch_bounds__(kThreads) plain_kernel(const __grid_constant__ DeviceCall call, const std::int64_t outputs) {
  __shared__ __align__(16) std::byte memory[sizeof(PlainShared<kSlices>)];
  auto& shared = *reinterpret_cast<PlainShared<kSlices>*>(memory);
  ptx::start_dependents();
  ptx::await_earlier_kernels();  // over already where this is not a dependent launch
  for (std::int64_t index = blockIdx.x; index < outputs; index += gridDim.x) {
    __syncthreads();  // the output before is over
    if (threadIdx.x == 0) find_output(call, index, kRows<kSlices>, shared.output);
    __syncthreads();
    if (shared.output.rows > 0) compute<kType>(call, shared);
  }
  __syncthreads();  // what any thread reported was before
  if (threadIdx.x == 0) name_fault(call.problem, call.fixup.slots.header());
}

using Kernel = void (*)(DeviceCall, std::int64_t);

template <DType kType>
Kernel kernel_of(std::int32_t widest_dim) noexcept {
  if (widest_dim <= 4 * kWarpThreads) return plain_kernel<kType, 4>;
  if (widest_dim <= 8 * kWarpThreads) return plain_kernel<kType, 8>;
  static_assert(kMaxHeadDim <= 18 * kWarpThreads);
  return plain_kernel<kType, 18>;
}

/// Null of float32, which the CUDA backend does not compute.
Kernel kernel_of(DType kv_dtype, std::int32_t widest_dim) noexcept {
  Kernel kernel = nullptr;
  with_dtype(kv_dtype, [&]<DType kType>() {
    if constexpr (kType != DType::kFloat32) kernel = kernel_of<kType>(widest_dim);
  });
  return kernel;
}

}  // namespace

Status enqueue_plain(const DeviceCall& call, bool overlaps, void* stream) noexcept {
  const Problem& problem = call.problem;
  const tile::TileConfig config = plain_tile(problem);
  const std::int64_t outputs = schedule::output_capacity(problem, config.q_rows);
  const Kernel kernel = kernel_of(problem.k.dtype, max_of(config.head_dim, config.value_dim));
  if (kernel == nullptr) {
    return refuse(StatusCode::kUnsupported, "k.dtype", static_cast<std::int64_t>(problem.k.dtype),
                  "the plain kernel does not read it");
  }
  const KernelLaunch launch{
      .grid = dim3(static_cast<unsigned>(min_of(outputs, kMostCtas))), .threads = kThreads, .overlaps = overlaps, .stream = stream};
  return enqueue_kernel(launch, kernel, call, outputs);
}

}  // namespace lean::cuda

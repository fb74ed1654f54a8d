// The end of a chunk under fixed_chunk (docs/fixup.md): its result becomes a node of the worker's stack, which lies in the slot of the
// segment, and is merged with its siblings there. At a segment's end the nodes of all contributors go through one stack more, in
// shared memory, into the output. By all consumer threads together.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_merge.cuh"
#include "backends/cuda/kernel/line_build.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

/// Four elements of a row of a tree node, and the row's state.
struct NodeQuad {
  Quad o;
  softmax::State state;

  /// Merges the node's left sibling into it.
  __device__ __forceinline__ void take_left(const NodeQuad& left) {
    const softmax::MergeStep step = softmax::merge_step(left.state, state);
#pragma unroll
    for (int i = 0; i < kQuadDims; ++i) o.x[i] = softmax::merge_element(step, left.o.x[i], o.x[i]);
    state = step.merged;
  }
};

/// A lane's own stack of nodes.
class LaneStack {
 public:
  static constexpr std::int32_t kNodeFloats = kQuadDims + 2;

  /// Floats of a warp's stacks.
  [[nodiscard]] __device__ static std::int32_t warp_floats(std::int32_t depth) { return depth * kNodeFloats * kWarpThreads; }

  __device__ LaneStack(float* warp_memory, std::int32_t depth, std::int32_t lane)
      : o_(reinterpret_cast<float4*>(warp_memory) + lane),
        states_(reinterpret_cast<softmax::State*>(warp_memory + depth * kQuadDims * kWarpThreads) + lane) {}

  __device__ __forceinline__ void push(const NodeQuad& node) {
    o_[count_ * kWarpThreads] = {node.o.x[0], node.o.x[1], node.o.x[2], node.o.x[3]};
    states_[count_ * kWarpThreads] = node.state;
    ++count_;
  }
  [[nodiscard]] __device__ __forceinline__ NodeQuad pop() {
    --count_;
    const float4 o = o_[count_ * kWarpThreads];
    return {.o = {{o.x, o.y, o.z, o.w}}, .state = states_[count_ * kWarpThreads]};
  }
  [[nodiscard]] __device__ __forceinline__ bool empty() const { return count_ == 0; }

 private:
  float4* o_;
  softmax::State* states_;
  std::int32_t count_ = 0;
};

template <KernelConfig kConfig>
class ChunkMerge {
 public:
  __device__ ChunkMerge(CtaMemory<kConfig>& memory, const SegmentRecord& record)
      : call_(memory.shared.call),
        record_(record),
        stacks_(memory.exchange),
        thread_(static_cast<std::int32_t>(threadIdx.x)),
        warp_(thread_ / kWarpThreads),
        lane_(thread_ % kWarpThreads) {}

  /// Once the chunk's own result is stored.
  __device__ __forceinline__ void run() {
    if (call_.pass == Pass::kWhole) {
      consumer_sync<kConfig>();  // the chunk's own result is there
      push_chunk();
      if (!record_.chunk.ends_segment) return;
      consumer_sync<kConfig>();
      if (!record_.sole() && !merges_output()) return;
    }
    merge_output();
    consumer_sync<kConfig>();  // the stacks' room is free again
  }

 private:
  /// Nodes asked for at once. More would be faster here, but what this function takes of registers, the loop over tiles spills: 40 bytes
  /// more with 3.
  static constexpr std::int32_t kAhead = 1;

  [[nodiscard]] __device__ __forceinline__ static NodeQuad load(const fixup::Partial& node, std::int32_t row, std::int32_t quad) {
    const float4 o = __ldcg(reinterpret_cast<const float4*>(node.o_row(row)) + quad);
    return {.o = {{o.x, o.y, o.z, o.w}}, .state = {.m = __ldcg(node.m + row), .l = __ldcg(node.l + row)}};
  }

  /// The chunk's node onto the stack in the segment's slot, a warp a row.
  __device__ __forceinline__ void push_chunk() {
    const ChunkPlace& chunk = record_.chunk;
    const fixup::Slots& slots = call_.slots;
    const std::int64_t slot = record_.slots.slot(record_.contributor);
    const std::int32_t place = chunk.place - chunk.merges;
    if (thread_ == 0) {
      fixup::NodeList& list = slots.node_list(slot);
      list.nodes[place] = chunk.node;
      list.count = place + 1;
    }
    if (chunk.merges == 0) return;
    const fixup::Partial to = slots.partial(slot, place);
#pragma unroll 1
    for (std::int32_t row = warp_; row < record_.rows; row += kConfig.consumer_warps) {
      NodeQuad whole;
#pragma unroll 1
      for (std::int32_t quad = lane_; quad < kRowQuads<kConfig>; quad += kWarpThreads) {
        whole = load(slots.partial(slot, chunk.place), row, quad);
#pragma unroll 1
        for (std::int32_t below = 1; below <= chunk.merges; ++below) {
          whole.take_left(load(slots.partial(slot, chunk.place - below), row, quad));
        }
        reinterpret_cast<float4*>(to.o_row(row))[quad] = {whole.o.x[0], whole.o.x[1], whole.o.x[2], whole.o.x[3]};
      }
      __syncwarp();  // all lanes have read the states below
      if (lane_ != 0) continue;
      to.m[row] = whole.state.m;
      to.l[row] = whole.state.l;
    }
  }

  /// Whether this worker is the one to merge the shared output: one level, its shape is the chunks' alone.
  [[nodiscard]] __device__ __forceinline__ bool merges_output() {
    if (call_.fixup == Fixup::kTwoKernels) return false;
    if (call_.fixup == Fixup::kHostBlock) return await_peers<kConfig>(call_.slots, record_);
    return arrive<kConfig>(call_.slots.counter(record_.slots.slot(0)), record_.contributors);
  }

  /// As many warps as have room for their stacks, a row each.
  __device__ __forceinline__ void merge_output() {
    const std::int32_t depth = (call_.slots.layout.nodes_per_slot + 1) / 2;  // fixup::max_chunk_nodes(): levels + 1
    const std::int32_t warp_floats = LaneStack::warp_floats(depth);
    const std::int32_t warps = min(kConfig.consumer_warps, quotient(kConfig.exchange_floats(), warp_floats));
    if (warp_ >= warps) return;
#pragma unroll 1
    for (std::int32_t row = warp_; row < record_.rows; row += warps) {
#pragma unroll 1
      for (std::int32_t first = 0; first < kRowQuads<kConfig>; first += kWarpThreads) {
        LaneStack stack(stacks_ + warp_ * warp_floats, depth, lane_);
        merge_quads(stack, row, first + lane_);
      }
    }
  }

  /// A quad a lane, of all contributors' nodes in order.
  __device__ __forceinline__ void merge_quads(LaneStack& stack, std::int32_t row, std::int32_t quad) {
#pragma unroll 1
    for (std::int32_t first = 0; first < record_.contributors; first += kWarpThreads) take_in(stack, first, row, quad);
    NodeQuad whole = stack.pop();
    while (!stack.empty()) whole.take_left(stack.pop());
    if (quad < kRowQuads<kConfig>) {
      const RowEnd end = end_row<kConfig>(call_, record_, row, whole.state, quad == 0);
      const std::int32_t dim = twisted_quad(row, quad) * kQuadDims;
      store_pair<kConfig>(call_, end, dim, {whole.o.x[0], whole.o.x[1]});
      store_pair<kConfig>(call_, end, dim + kPairDims, {whole.o.x[2], whole.o.x[3]});
    }
  }

  /// The nodes of contributors [first, first + 32), some ahead of the merges.
  __device__ __forceinline__ void take_in(LaneStack& stack, std::int32_t first, std::int32_t row, std::int32_t quad) {
    const fixup::Slots& slots = call_.slots;
    const schedule::SlotMap& slot_map = record_.slots;
    const std::int32_t contributor = first + lane_;
    const std::int32_t own = contributor < record_.contributors ? __ldcg(&slots.node_list(slot_map.slot(contributor)).count) : 0;
    const std::int32_t begin = warp_before(own);
    const std::int32_t nodes = __shfl_sync(ptx::kAllLanes, begin + own, kWarpThreads - 1);
    const bool mine = quad < kRowQuads<kConfig>;
#pragma unroll 1
    for (std::int32_t base = 0; base < nodes; base += kAhead) {
      NodeQuad ahead[kAhead];
      std::int32_t merges[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i >= nodes) break;
        const std::int32_t owner = __popc(__ballot_sync(ptx::kAllLanes, begin + own <= base + i));
        const std::int32_t node = base + i - __shfl_sync(ptx::kAllLanes, begin, owner);
        const std::int64_t slot = slot_map.slot(first + owner);
        const fixup::ChunkNode& name = slots.node_list(slot).nodes[node];
        const std::int64_t index = __ldcg(reinterpret_cast<const long long*>(&name.index));
        merges[i] = fixup::push_after(record_.chunk.output_first, true, {.level = __ldcg(&name.level), .index = index}).merges;
        if (mine) ahead[i] = load(slots.partial(slot, node), row, quad);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i >= nodes) break;
#pragma unroll 1
        for (std::int32_t m = 0; m < merges[i]; ++m) ahead[i].take_left(stack.pop());
        stack.push(ahead[i]);
      }
    }
  }

  const DeviceCall& call_;
  const SegmentRecord& record_;
  float* stacks_;
  std::int32_t thread_;
  std::int32_t warp_;
  std::int32_t lane_;
};

template <KernelConfig kConfig>
__device__ __noinline__ void hand_over_any(std::int32_t record_place) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  if (Asked<kConfig>(memory.shared.call).chunks()) {
    ChunkMerge<kConfig>(memory, memory.shared.records[record_place]).run();
  } else {
    merge_shared<kConfig>(record_place);
  }
}

/// Called by all consumer threads at the end of a segment, or a chunk, whose result went to a slot; in the merging pass, for each
/// shared output.
template <KernelConfig kConfig>
__device__ __forceinline__ void hand_over(std::int32_t record_place) {
  if constexpr (kConfig.step()) {
    merge_shared<kConfig>(record_place);
  } else {
    hand_over_any<kConfig>(record_place);
  }
}

}  // namespace lean::cuda

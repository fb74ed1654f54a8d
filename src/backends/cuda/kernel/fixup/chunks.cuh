// The end of a chunk under fixed_chunk (docs/fixup.md): what the warps staged of it becomes a node of the worker's stack, which
// lies in the slot of the segment, and is merged with its siblings there, a warp a row; where no other worker has a part of the
// output, the last node takes in all that are left and goes to the output. Else, at the segment's end, whoever arrives last takes
// the nodes of all contributors through one stack more, in shared memory. By all consumer threads together.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/arrival.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

/// Merges a node's left sibling into it.
template <KernelConfig kConfig>
__device__ __forceinline__ void take_left(RowSlice<kConfig>& node, const RowSlice<kConfig>& left) {
  const softmax::MergeStep step = softmax::merge_step(left.state, node.state);
#pragma unroll
  for (int i = 0; i < kLaneDims<kConfig>; ++i) {  // softmax::merge_element() without its selection: the O of empty nodes is 0
    node.o.x[i] = step.first_is_big ? fmaf(node.o.x[i], step.factor, left.o.x[i]) : fmaf(left.o.x[i], step.factor, node.o.x[i]);
  }
  node.state = step.merged;
}

template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ RowSlice<kConfig> load_node(const fixup::Partial& node, std::int32_t row,
                                                                     std::int32_t slice) {
  return {.o = load_past_l1<kConfig>(node.o + row * kConfig.value_dim() + dim_of_lane<kConfig>(slice)),
          .state = {.m = __ldcg(node.m + row), .l = __ldcg(node.l + row)}};
}

/// The chunk's own result, as the warps staged it, or in the slot.
template <KernelConfig kConfig>
struct StagedNode {
  [[nodiscard]] __device__ __forceinline__ RowSlice<kConfig> operator()(std::int32_t, std::int32_t staged,
                                                                        std::int32_t slice) const {
    const WarpParts<kConfig> parts{cta_memory<kConfig>()};
    return gather_slice<kConfig.token_warps(), kConfig>(parts, ask_for_slice<kConfig.token_warps(), kConfig>(parts, staged, slice));
  }
};
template <KernelConfig kConfig>
struct StoredNode {
  fixup::Partial node;

  [[nodiscard]] __device__ __forceinline__ RowSlice<kConfig> operator()(std::int32_t row, std::int32_t, std::int32_t slice) const {
    return load_node<kConfig>(node, row, slice);
  }
};

/// Pushes the chunk's node. All slices of a row by one warp, always the same for a row: what it stores, it alone reads until the
/// segment ends.
template <KernelConfig kConfig, typename TNode, typename TRows>
__device__ __forceinline__ void push_chunk(const SegmentRecord& record, const TNode& own, const TRows& rows) {
  constexpr int kSlices = kRowSlices<kConfig>;
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const ChunkPlace& chunk = record.chunk;
  const fixup::Slots& slots = shared.call.fixup.slots;
  const std::int64_t slot = record.slots.slot(record.contributor);
  const fixup::Partial to = slots.partial(slot, chunk.place - chunk.merges);
  if (ptx::thread_index() == 0 && !chunk.ends_output) {
    fixup::NodeList& list = slots.node_list(slot);
    list.nodes[chunk.place - chunk.merges] = chunk.node;
    list.count = chunk.place - chunk.merges + 1;
  }
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads); i < rows.kCount; i += kConfig.consumer_warps) {
    const std::int32_t row = rows.row(i);
    if (row >= record.rows) return;
    RowSlice<kConfig> left[kSlices];  // asked for before the chunk's own result is gathered
    if (chunk.merges > 0) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
        left[slice] = load_node<kConfig>(slots.partial(slot, chunk.place - 1), row, slice);
    }
    RowSlice<kConfig> node[kSlices];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) node[slice] = own(row, i, slice);
#pragma unroll 1
    for (std::int32_t below = 1; below <= chunk.merges; ++below) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        take_left(node[slice], left[slice]);
        if (below < chunk.merges) left[slice] = load_node<kConfig>(slots.partial(slot, chunk.place - below - 1), row, slice);
      }
    }
    __syncwarp();  // all lanes have read the states below
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (chunk.ends_output) {
        output_slice<kConfig>(shared.call, record, row, slice, node[slice]);
      } else {
        store_slice<kConfig>(to, row, slice, node[slice]);
      }
    }
  }
}

/// All rows of a row block, whether they exist or not.
template <KernelConfig kConfig>
struct BlockRows {
  static constexpr std::int32_t kCount = kConfig.q_rows;

  [[nodiscard]] __device__ __forceinline__ static std::int32_t row(std::int32_t i) { return i; }
};

/// A warp's stack of slices of nodes: the newest in registers, so that a merge waits for no memory.
template <KernelConfig kConfig>
class SliceStack {
 public:
  using Slice = RowSlice<kConfig>;

  /// Floats of a stack for nodes of `depth` levels.
  [[nodiscard]] __device__ static std::int32_t floats(std::int32_t depth) { return depth * kLevelFloats; }

  __device__ explicit SliceStack(float* memory) : below_(memory) {}

  __device__ __forceinline__ void push(const Slice& slice) {
    if (count_ > 0) {
      elements() = top_.o;
      state() = {top_.state.m, top_.state.l};
      below_ += kLevelFloats;
    }
    top_ = slice;
    ++count_;
  }
  [[nodiscard]] __device__ __forceinline__ Slice pop() {
    const Slice popped = top_;
    if (--count_ > 0) {
      below_ -= kLevelFloats;
      top_ = {.o = elements(), .state = {.m = state().x, .l = state().y}};
    }
    return popped;
  }
  [[nodiscard]] __device__ __forceinline__ bool empty() const { return count_ == 0; }

 private:
  static constexpr std::int32_t kLevelFloats = kWarpThreads * (kLaneDims<kConfig> + 2);

  /// This lane's elements, and its state, of the level that begins at below_.
  [[nodiscard]] __device__ __forceinline__ LaneElements<kConfig>& elements() const {
    return reinterpret_cast<LaneElements<kConfig>*>(below_)[lane()];
  }
  [[nodiscard]] __device__ __forceinline__ float2& state() const {
    return reinterpret_cast<float2*>(below_ + kWarpThreads * kLaneDims<kConfig>)[lane()];
  }

  float* below_;
  Slice top_;
  std::int32_t count_ = 0;
};

/// The nodes of all contributors of an output, in order: a lane looks up a node, and all lanes merge it.
template <KernelConfig kConfig>
class NodeMerge {
 public:
  __device__ explicit NodeMerge(std::int32_t record_index)
      : memory_(cta_memory<kConfig>()), record_(memory_.shared.records[record_index]), slots_(memory_.shared.call.fixup.slots) {}

  /// Merges into the output: as many warps as have room for their stacks, a slice of a row each.
  __device__ __forceinline__ void run() const {
    constexpr std::int32_t kSlices = kRowSlices<kConfig>;
    const std::int32_t stack_floats =
        SliceStack<kConfig>::floats((slots_.layout.nodes_per_slot + 1) / 2);  // fixup::max_chunk_nodes(): levels + 1
    const std::int32_t warps = min(kConfig.consumer_warps, quotient(kConfig.exchange_floats(), stack_floats));
    const auto warp = static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads);
    if (warp >= warps) return;
#pragma unroll 1
    for (std::int32_t i = warp; i < record_.rows * kSlices; i += warps) {
      const std::int32_t row = i / kSlices;
      const std::int32_t slice = i % kSlices;
      SliceStack<kConfig> stack(memory_.exchange + warp * stack_floats);
#pragma unroll 1
      for (std::int32_t first = 0; first < record_.contributors; first += kWarpThreads) take_in(stack, first, row, slice);
      RowSlice<kConfig> whole = stack.pop();
      while (!stack.empty()) take_left(whole, stack.pop());
      output_slice<kConfig>(memory_.shared.call, record_, row, slice, whole);
    }
  }

 private:
  /// Nodes whose elements are asked for at once. More would be faster, but registers that this function uses are spilled in the
  /// loop over tiles.
  static constexpr std::int32_t kAhead = kConfig.step() ? (kConfig.kv_type().converted() ? 4 : 16) : 1;

  /// What a lane knows of one node.
  struct Node {
    const float* row = nullptr;
    softmax::State state;
    std::int32_t merges = 0;
  };

  [[nodiscard]] __device__ __forceinline__ Node find(std::int64_t slot, std::int32_t place, std::int32_t row) const {
    const fixup::ChunkNode& name = slots_.node_list(slot).nodes[place];
    const std::int64_t index = __ldcg(reinterpret_cast<const long long*>(&name.index));
    const fixup::ChunkNode node{.level = __ldcg(&name.level), .index = index};
    const fixup::Partial at = slots_.partial(slot, place);
    return {.row = at.o + row * kConfig.value_dim(),
            .state = {.m = __ldcg(at.m + row), .l = __ldcg(at.l + row)},
            .merges = fixup::push_after(record_.chunk.output_first, true, node).merges};
  }

  /// Takes in the nodes of contributors [first, first + 32).
  __device__ __forceinline__ void take_in(SliceStack<kConfig>& stack, std::int32_t first, std::int32_t row,
                                          std::int32_t slice) const {
    const std::int32_t contributor = first + lane();
    const std::int32_t own =
        contributor < record_.contributors ? __ldcg(&slots_.node_list(record_.slots.slot(contributor)).count) : 0;
    const std::int32_t end = ptx::warp_sum_before(own) + own;
    const std::int32_t nodes = __shfl_sync(ptx::kAllLanes, end, kWarpThreads - 1);
#pragma unroll 1
    for (std::int32_t base = 0; base < nodes; base += kWarpThreads) {
      const std::int32_t wanted = base + lane();
      std::int32_t owner = 0;  // contributors whose nodes all lie before it
#pragma unroll
      for (std::int32_t step = kWarpThreads / 2; step > 0; step /= 2) {
        if (__shfl_sync(ptx::kAllLanes, end, owner + step - 1) <= wanted) owner += step;
      }
      const std::int32_t before = __shfl_sync(ptx::kAllLanes, end - own, owner);
      Node node;
      if (wanted < nodes) node = find(record_.slots.slot(first + owner), wanted - before, row);
      take_in(stack, node, min(kWarpThreads, nodes - base), slice);
    }
  }

  /// Takes in `count` nodes, of which each lane knows one.
  __device__ __forceinline__ void take_in(SliceStack<kConfig>& stack, const Node& known, std::int32_t count,
                                          std::int32_t slice) const {
#pragma unroll 1
    for (std::int32_t base = 0; base < count; base += kAhead) {
      LaneElements<kConfig> ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const auto from =
            reinterpret_cast<const float*>(__shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(known.row), base + i));
        if (base + i < count) ahead[i] = load_past_l1<kConfig>(from + dim_of_lane<kConfig>(slice));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + i >= count) break;
        RowSlice<kConfig> node{.o = ahead[i],
                               .state = {.m = __shfl_sync(ptx::kAllLanes, known.state.m, base + i),
                                         .l = __shfl_sync(ptx::kAllLanes, known.state.l, base + i)}};
        const std::int32_t merges = __shfl_sync(ptx::kAllLanes, known.merges, base + i);
#pragma unroll 1
        for (std::int32_t m = 0; m < merges; ++m) take_left(node, stack.pop());
        stack.push(node);
      }
    }
  }

  CtaMemory<kConfig>& memory_;
  const SegmentRecord& record_;
  const fixup::Slots& slots_;
};

/// Whether this worker is the one to merge the shared output: one level, its shape is the chunks' alone.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool merges_nodes(const DeviceCall& call, const SegmentRecord& record) {
  if (Asked<kConfig>(call).merge_only()) return true;
  if (!Asked<kConfig>(call).last_arriver()) {
    return call.fixup.kind == Fixup::kHostBlock && await_peers<kConfig>(call.fixup.slots, record);
  }
  return arrive<kConfig>(call.fixup.slots.counter(record.slots.slot(0)), record.contributors);
}

/// Called by all consumer threads at the end of a segment of chunks whose output is shared. Not inlined, so that the loop over
/// tiles keeps its registers.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_shared_nodes(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if (!merges_nodes<kConfig>(shared.call, shared.records[record_index])) return;
  note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
  NodeMerge<kConfig>(record_index).run();
  note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
  consumer_sync<kConfig>();  // the stacks' room is free again
}

}  // namespace lean::cuda

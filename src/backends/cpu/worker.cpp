#include "backends/cpu/worker.hpp"

#include <atomic>
#include <cstring>

#include "base/float_types.hpp"
#include "fixup/arrival.hpp"
#include "fixup/chunk_tree.hpp"
#include "fixup/partial.hpp"
#include "output/rows.hpp"
#include "problem/preconditions.hpp"
#include "softmax/state.hpp"

namespace lean::cpu {
namespace {

using fixup::ChunkTree;
using fixup::Counter;
using fixup::Partial;
using schedule::Segment;

/// The arrival protocol's atomics on CPU threads.
struct ThreadAtomic {
  static Counter fetch_add_acq_rel(Counter& counter, Counter amount) noexcept {
    return std::atomic_ref<Counter>(counter).fetch_add(amount, std::memory_order_acq_rel);
  }
  static Counter load_acquire(Counter& counter) noexcept { return std::atomic_ref<Counter>(counter).load(std::memory_order_acquire); }
  static void store_release(Counter& counter, Counter value) noexcept {
    std::atomic_ref<Counter>(counter).store(value, std::memory_order_release);
  }
  static void store_relaxed(Counter& counter, Counter value) noexcept {
    std::atomic_ref<Counter>(counter).store(value, std::memory_order_relaxed);
  }
  static void relax() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }
};

/// Element i of a row with any element stride, by conversion; the path for layouts no vector load fits.
template <typename T>
void load_strided(const void* data, std::int64_t stride, float* out, std::int32_t dims) noexcept {
  const auto* values = static_cast<const T*>(data);
  for (std::int32_t d = 0; d < dims; ++d) out[d] = to_float(values[d * stride]);
}

template <typename T>
void store_strided(const float* in, float scale, void* data, std::int64_t stride, std::int32_t dims) noexcept {
  auto* values = static_cast<T*>(data);
  for (std::int32_t d = 0; d < dims; ++d) values[d * stride] = from_float<T>(scale == 0.0F ? 0.0F : in[d] * scale);
}

const std::byte* element(const TensorView& tensor, std::int64_t offset_elems) noexcept {
  return static_cast<const std::byte*>(tensor.data) + offset_elems * bytes_of(tensor.dtype);
}

class Worker {
 public:
  Worker(const Call& call, std::int32_t worker) noexcept
      : call_(call), memory_(call.memory, call.worker_memory + worker * call.memory.bytes()), worker_(worker) {}

  void run() noexcept {
    for (schedule::SegmentCursor cursor(call_.line, call_.plan, worker_); cursor.next();) {
      const Segment& segment = cursor.segment();
      enter(segment);
      load_queries(segment);
      compute(segment);
      if (segment.sole()) {
        write_output(segment, memory_.partial(0));
      } else {
        hand_over(segment);
      }
    }
  }

  void merge_shared() noexcept {
    for (schedule::SegmentCursor cursor(call_.line, call_.plan, worker_); cursor.next();) {
      const Segment& segment = cursor.segment();
      if (segment.sole() || segment.contributor != 0) continue;
      enter(segment);
      merge_all(segment);
      write_output(segment, memory_.partial(0));
    }
  }

 private:
  [[nodiscard]] bool chunked() const noexcept { return call_.plan.kind == Policy::Kind::kFixedChunk; }

  void enter(const Segment& segment) noexcept {
    lengths_ = call_.lengths(segment.output.sequence);
    rows_ = segment.output.rows;
    first_row_ = static_cast<std::int64_t>(segment.output.row_block) * call_.memory.config.q_rows;
  }

  /// The backend's vector loop for O of two partials.
  [[nodiscard]] auto row_merger() const noexcept {
    return [this](const softmax::MergeStep& step, float* into, const float* other) {
      call_.kernels.merge_row(step, into, other, memory_.layout.config.value_dim);
    };
  }

  [[nodiscard]] auto merge_places() const noexcept {
    return [this](std::int32_t left, std::int32_t right) {
      fixup::merge_into(memory_.partial(left), memory_.partial(right), rows_, row_merger());
    };
  }

  // ---- LeanTile ---------------------------------------------------------------------------------------------------

  void load_queries(const Segment& segment) noexcept {
    const Problem& problem = call_.problem;
    const std::int32_t group = problem.q_heads / problem.kv_heads;
    const std::int32_t stride = memory_.layout.config.head_dim;
    for (std::int32_t r = 0; r < rows_; ++r) {
      const PackedRow at = packed_row(first_row_ + r, group);
      const HeadPosition head{segment.output.sequence, segment.output.kv_head * group + at.head_in_group};
      const std::int64_t offset =
          q_offset(problem.q.strides, lengths_, head, problem.cu_q_tokens != nullptr) + at.token * problem.q.strides.token;
      float* row = memory_.query + std::int64_t{r} * stride;
      load_elements(problem.q, offset, row, problem.head_dim);
      for (std::int32_t d = problem.head_dim; d < stride; ++d) row[d] = 0.0F;
      if (problem.q.dtype == DType::kBFloat16) {  // exact: the values were bf16
        std::uint16_t* bf16 = memory_.query_bf16 + std::int64_t{r} * stride;
        for (std::int32_t d = 0; d < stride; ++d) bf16[d] = from_float<BFloat16>(row[d]).bits;
      }
    }
  }

  void load_elements(const TensorView& tensor, std::int64_t offset, float* out, std::int32_t dims) const noexcept {
    const std::byte* data = element(tensor, offset);
    if (tensor.strides.dim == 1) return call_.kernels.load_row[table_index(tensor.dtype)](data, out, dims);
    switch (tensor.dtype) {
      case DType::kFloat16: return load_strided<Half>(data, tensor.strides.dim, out, dims);
      case DType::kBFloat16: return load_strided<BFloat16>(data, tensor.strides.dim, out, dims);
      default: return load_strided<float>(data, tensor.strides.dim, out, dims);
    }
  }

  /// The segment's result ends at memory_.partial(0); with chunks, its tree nodes at partial(0), partial(1), ...
  void compute(const Segment& segment) noexcept {
    if (!chunked()) {
      clear(memory_.partial(0));
      compute_tiles(segment, segment.tile_begin, segment.tile_end, memory_.partial(0));
      return;
    }
    tree_ = {};
    const std::int64_t chunk_tiles = call_.plan.granularity_tiles;
    for (std::int64_t tile = segment.tile_begin; tile < segment.tile_end; tile += chunk_tiles) {
      const Partial leaf = memory_.partial(tree_.count());
      clear(leaf);
      compute_tiles(segment, tile, min_of(tile + chunk_tiles, segment.tile_end), leaf);
      tree_.push({.level = 0, .index = tile / chunk_tiles}, merge_places());
    }
    if (segment.sole()) tree_.fold(merge_places());
  }

  void clear(const Partial& partial) const noexcept {
    for (std::int32_t r = 0; r < rows_; ++r) {
      std::memset(partial.o_row(r), 0, static_cast<std::size_t>(partial.value_stride) * sizeof(float));
      partial.m[r] = softmax::kNegInf;
      partial.l[r] = 0.0F;
    }
  }

  /// LeanTile() of the paper for tiles [begin, end): adds them to `into`.
  void compute_tiles(const Segment& segment, std::int64_t begin, std::int64_t end, const Partial& into) noexcept {
    const Problem& problem = call_.problem;
    const std::int32_t tile_tokens = call_.memory.config.tile_tokens;
    const HeadPosition head{segment.output.sequence, segment.output.kv_head};
    const bool cumulative = problem.cu_kv_tokens != nullptr;
    const std::int64_t k_offset = kv_offset(problem.k.strides, lengths_, head, cumulative);
    const std::int64_t v_offset = kv_offset(problem.v.strides, lengths_, head, cumulative);
    const std::int32_t last_visible = visible_end_of(rows_ - 1);
    const QueryRows q{{memory_.query, rows_, memory_.layout.config.head_dim}, memory_.query_bf16};
    const RowBuffer s{memory_.scores, rows_, memory_.layout.score_stride()};
    const RowBuffer o{into.o, rows_, static_cast<std::int32_t>(into.value_stride)};
    const SoftmaxRows softmax_rows{call_.log2_scale, memory_.visible, into.m, into.l, memory_.rescale};
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t token = lengths_.kv_begin + tile * tile_tokens;
      const auto tokens = static_cast<std::int32_t>(min_of(tile_tokens, last_visible - token));
      if (tokens <= 0) return;  // the one tile of an empty output
      const TokenRows k = tile_rows(problem.k, k_offset, token, tokens, problem.head_dim, memory_.packed_k);
      const TokenRows v = tile_rows(problem.v, v_offset, token, tokens, value_dim_of(problem), memory_.packed_v);
      const auto next_tokens = static_cast<std::int32_t>(clamp_to(last_visible - token - tile_tokens, 0, tile + 1 < end ? tile_tokens : 0));
      set_visible(token, tokens);
      call_.kernels.scores[kernel_of(problem.k)](q, k, s, prefetch_of(problem.v, v_offset, token, tokens, v.dims));
      call_.kernels.online_softmax(s, tokens, softmax_rows);
      call_.kernels.accumulate[kernel_of(problem.v)](o, s, v, memory_.rescale,
                                                     prefetch_of(problem.k, k_offset, token + tile_tokens, next_tokens, k.dims));
    }
  }

  [[nodiscard]] std::int32_t visible_end_of(std::int32_t row) const noexcept {
    const std::int32_t group = call_.problem.q_heads / call_.problem.kv_heads;
    return visible_end(lengths_, packed_row(first_row_ + row, group).token, call_.problem.scores.causal);
  }

  void set_visible(std::int64_t token, std::int32_t tokens) noexcept {
    for (std::int32_t r = 0; r < rows_; ++r) {
      memory_.visible[r] = static_cast<std::int32_t>(clamp_to(visible_end_of(r) - token, 0, tokens));
    }
  }

  /// Contiguous elements are read in place; others are copied to fp32 first.
  [[nodiscard]] static bool in_place(const TensorView& tensor) noexcept { return tensor.strides.dim == 1; }
  [[nodiscard]] static int kernel_of(const TensorView& tensor) noexcept {
    return table_index(in_place(tensor) ? tensor.dtype : DType::kFloat32);
  }

  [[nodiscard]] TokenRows tile_rows(const TensorView& tensor, std::int64_t offset, std::int64_t token, std::int32_t tokens,
                                    std::int32_t dims, float* packed) const noexcept {
    const std::int64_t first = offset + token * tensor.strides.token;
    if (in_place(tensor)) return {element(tensor, first), tensor.strides.token * bytes_of(tensor.dtype), tokens, dims};
    const std::int64_t stride = round_up(dims, kLaneMultiple);
    for (std::int32_t t = 0; t < tokens; ++t) load_elements(tensor, first + t * tensor.strides.token, packed + t * stride, dims);
    return {packed, stride * static_cast<std::int64_t>(sizeof(float)), tokens, dims};
  }

  [[nodiscard]] static Prefetch prefetch_of(const TensorView& tensor, std::int64_t offset, std::int64_t token, std::int32_t tokens,
                                           std::int32_t dims) noexcept {
    if (!in_place(tensor) || tokens <= 0) return {};
    const std::int64_t element_bytes = bytes_of(tensor.dtype);
    return {element(tensor, offset + token * tensor.strides.token), tensor.strides.token * element_bytes, tokens,
            static_cast<std::int32_t>(dims * element_bytes)};
  }

  // ---- fix-up -----------------------------------------------------------------------------------------------------

  void copy(const Partial& from, const Partial& to) const noexcept {
    const std::size_t row_bytes = static_cast<std::size_t>(memory_.layout.config.value_dim) * sizeof(float);
    for (std::int32_t r = 0; r < rows_; ++r) {
      std::memcpy(to.o_row(r), from.o_row(r), row_bytes);
      to.m[r] = from.m[r];
      to.l[r] = from.l[r];
    }
  }

  void store_partial(const Segment& segment) noexcept {
    const std::int64_t slot = segment.slots.slot(segment.contributor);
    if (!chunked()) return copy(memory_.partial(0), call_.slots.partial(slot));
    fixup::NodeList& list = call_.slots.node_list(slot);
    list.count = tree_.count();
    for (std::int32_t n = 0; n < tree_.count(); ++n) {
      list.nodes[n] = tree_.node(n);
      copy(memory_.partial(n), call_.slots.partial(slot, n));
    }
  }

  void hand_over(const Segment& segment) noexcept {
    if (call_.fixup == Fixup::kHostBlock) return host_or_peer(segment);
    store_partial(segment);
    if (call_.fixup == Fixup::kLastArriver) merge_if_last(segment);
  }

  /// The paper's fix-up: the worker of the first tile takes in the others' partials, in order, as they are signalled.
  void host_or_peer(const Segment& segment) noexcept {
    if (segment.contributor != 0) {
      store_partial(segment);
      fixup::signal<ThreadAtomic>(call_.slots.counter(segment.slots.slot(segment.contributor)));
      return;
    }
    for (std::int32_t c = 1; c < segment.contributors; ++c) {
      fixup::wait_for<ThreadAtomic>(call_.slots.counter(segment.slots.slot(c)));
      take_in(segment.slots.slot(c));
    }
    if (chunked()) tree_.fold(merge_places());
    write_output(segment, memory_.partial(0));
  }

  void merge_if_last(const Segment& segment) noexcept {
    const fixup::Grouping grouping = grouping_for(segment);
    const std::int32_t group = segment.contributor / grouping.size;
    const std::int32_t begin = grouping.begin(group);
    const std::int32_t end = grouping.end(group, segment.contributors);
    const std::int64_t group_slot = segment.slots.slot(begin);
    if (!fixup::arrive_last<ThreadAtomic>(call_.slots.counter(group_slot), end - begin)) return;
    merge_contributors(segment, begin, end);
    if (grouping.groups > 1) {
      copy(memory_.partial(0), call_.slots.group_partial(group_slot));
      if (!fixup::arrive_last<ThreadAtomic>(call_.slots.second_counter(segment.slots.slot(0)), grouping.groups)) return;
      merge_groups(segment, grouping);
    }
    write_output(segment, memory_.partial(0));
  }

  /// The same merges as merge_if_last, by one worker: bits do not depend on the mode.
  void merge_all(const Segment& segment) noexcept {
    const fixup::Grouping grouping = grouping_for(segment);
    for (std::int32_t group = 0; group < grouping.groups; ++group) {
      merge_contributors(segment, grouping.begin(group), grouping.end(group, segment.contributors));
      if (grouping.groups > 1) copy(memory_.partial(0), call_.slots.group_partial(segment.slots.slot(grouping.begin(group))));
    }
    if (grouping.groups > 1) merge_groups(segment, grouping);
  }

  /// The chunk tree has one level for everybody: its shape is the chunks' alone.
  [[nodiscard]] fixup::Grouping grouping_for(const Segment& segment) const noexcept {
    return chunked() ? fixup::Grouping{.size = segment.contributors, .groups = 1} : fixup::grouping_of(segment.contributors);
  }

  /// Contributors [begin, end), in index order, into memory_.partial(0).
  void merge_contributors(const Segment& segment, std::int32_t begin, std::int32_t end) noexcept {
    tree_ = {};
    if (!chunked()) copy(call_.slots.partial(segment.slots.slot(begin)), memory_.partial(0));
    for (std::int32_t c = chunked() ? begin : begin + 1; c < end; ++c) take_in(segment.slots.slot(c));
    if (chunked()) tree_.fold(merge_places());
  }

  void merge_groups(const Segment& segment, const fixup::Grouping& grouping) noexcept {
    copy(call_.slots.group_partial(segment.slots.slot(0)), memory_.partial(0));
    for (std::int32_t group = 1; group < grouping.groups; ++group) {
      const Partial other = call_.slots.group_partial(segment.slots.slot(grouping.begin(group)));
      fixup::merge_into(memory_.partial(0), other, rows_, row_merger());
    }
  }

  /// Adds a slot's partial to what is held; chunked: its nodes to the tree.
  void take_in(std::int64_t slot) noexcept {
    if (!chunked()) return fixup::merge_into(memory_.partial(0), call_.slots.partial(slot), rows_, row_merger());
    const fixup::NodeList& list = call_.slots.node_list(slot);
    for (std::int32_t n = 0; n < list.count; ++n) {
      copy(call_.slots.partial(slot, n), memory_.partial(tree_.count()));
      tree_.push(list.nodes[n], merge_places());
    }
  }

  // ---- output -----------------------------------------------------------------------------------------------------

  void write_output(const Segment& segment, const Partial& whole) const noexcept {
    const Problem& problem = call_.problem;
    const HeadPosition head{segment.output.sequence, segment.output.kv_head};
    for (std::int32_t r = 0; r < rows_; ++r) {
      const softmax::Finished finished = softmax::finalize(whole.state(r));
      const std::int64_t offset = output::row_offset(problem, lengths_, head, first_row_ + r);
      store_elements(problem.o, offset, whole.o_row(r), finished.scale);
      output::write_lse(problem, lengths_, head, first_row_ + r, finished.lse);
    }
  }

  void store_elements(const OutputView& tensor, std::int64_t offset, const float* row, float scale) const noexcept {
    std::byte* data = static_cast<std::byte*>(tensor.data) + offset * bytes_of(tensor.dtype);
    const std::int32_t dims = value_dim_of(call_.problem);
    if (tensor.strides.dim == 1) return call_.kernels.store_row[table_index(tensor.dtype)](row, scale, data, dims);
    switch (tensor.dtype) {
      case DType::kFloat16: return store_strided<Half>(row, scale, data, tensor.strides.dim, dims);
      case DType::kBFloat16: return store_strided<BFloat16>(row, scale, data, tensor.strides.dim, dims);
      default: return store_strided<float>(row, scale, data, tensor.strides.dim, dims);
    }
  }

  const Call& call_;
  WorkerMemory memory_;
  std::int32_t worker_;
  Sequence lengths_;
  std::int32_t rows_ = 0;
  std::int64_t first_row_ = 0;
  ChunkTree tree_;
};

}  // namespace

void run_worker(const Call& call, std::int32_t worker) noexcept { Worker(call, worker).run(); }

void merge_shared_outputs(const Call& call, std::int32_t worker) noexcept { Worker(call, worker).merge_shared(); }

}  // namespace lean::cpu

// Alg. 2 on a thread: a worker's segments, LeanTiles into a partial, hand-over by the fix-up that was asked for, output. Stages
// follow each other in the class as in the paper.
#include "backends/cpu/worker.hpp"

#include <algorithm>
#include <cstring>

#include "backends/cpu/elements.hpp"
#include "backends/cpu/kv_tiles.hpp"
#include "backends/cpu/sticky.hpp"
#include "backends/cpu/thread_atomic.hpp"
#include "backends/cpu/tile_loop.hpp"
#include "backends/cpu/worker_track.hpp"
#include "fixup/arrival.hpp"
#include "fixup/chunk_tree.hpp"
#include "fixup/ordered_merge.hpp"
#include "fixup/partial.hpp"
#include "output/rows.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/length_faults.hpp"
#include "problem/preconditions.hpp"
#include "softmax/state.hpp"

namespace lean::cpu {
namespace {

using fixup::ChunkTree;
using fixup::Partial;
using schedule::Segment;
using timeline::EventKind;

class Worker {
 public:
  Worker(const Call& call, std::int32_t worker) noexcept
      : call_(call),
        memory_(call.memory, call.worker_memory + worker * call.memory.bytes()),
        tiles_(call.problem, call.kernels, memory_, call.log2_scale),
        worker_(worker),
        track_(worker) {}

  void run() noexcept {
    for (schedule::SegmentCursor cursor(call_.line, call_.plan, worker_); cursor.next();) {
      const Segment& segment = cursor.segment();
      enter(segment);
      done_.tiles += segment.tile_end - segment.tile_begin;
      track_.note(EventKind::kStreamBegin, segment);
      tiles_.begin(output_);
      compute(segment);
      track_.note(EventKind::kStreamEnd, segment);
      if (segment.sole()) {
        write_output(memory_.partial(0));
        track_.note(EventKind::kWritten, segment);
      } else {
        hand_over(segment);
      }
    }
    if (tiles_.met_bad_page()) report(call_.problem, call_.slots.header(), StatusCode::kBadPageIndex);
    hand_in();
  }

  void merge_shared() noexcept {
    for (schedule::SegmentCursor cursor(call_.line, call_.plan, worker_); cursor.next();) {
      const Segment& segment = cursor.segment();
      if (segment.sole() || segment.contributor != 0) continue;
      enter(segment);
      merge_whole(segment);
    }
    hand_in();
  }

 private:
  /// Once, at the end: neighbours' sums share a cache line.
  void hand_in() const noexcept {
    call_.done[worker_].tiles += done_.tiles;
    call_.done[worker_].outputs += done_.outputs;
  }
  [[nodiscard]] bool chunked() const noexcept { return call_.plan.kind == Policy::Kind::kFixedChunk; }

  void enter(const Segment& segment) noexcept {
    const schedule::Output& output = segment.output;
    output_ = {.lengths = call_.line.lengths()(output.sequence),
               .kv_head = {output.sequence, output.kv_head},
               .first_row = static_cast<std::int64_t>(output.row_block) * call_.memory.config.q_rows,
               .rows = output.rows,
               .group = call_.problem.q_heads / call_.problem.kv_heads,
               .reach = reach_of(call_.problem.scores)};
  }

  /// Merges two nodes of the chunk tree, which lie at places of memory_.
  [[nodiscard]] auto merge_places() const noexcept {
    const auto merge_row = [this](const softmax::MergeStep& step, float* into, const float* other) {
      const float* big = step.first_is_big ? into : other;
      const float* small = step.first_is_big ? other : into;
      if (step.small_is_empty) {
        if (big != into) std::copy_n(big, memory_.layout.config.value_dim, into);
        return;
      }
      call_.kernels.add_scaled(big, small, step.factor, into, memory_.layout.config.value_dim);
    };
    return [this, merge_row](std::int32_t left, std::int32_t right) {
      fixup::merge_into(memory_.partial(left), memory_.partial(right), output_.rows, merge_row);
    };
  }

  /// The ordered merge of `count` parts.
  template <typename TPartAt>
  void merge_parts(const Partial& into, std::int32_t count, const TPartAt& part_at) const noexcept {
    fixup::merge_parts(into, output_.rows, count, part_at, [this](float* sums, const float* part, float weight) {
      call_.kernels.add_scaled(sums, part, weight, sums, memory_.layout.config.value_dim);
    });
  }

  // ---- LeanTiles --------------------------------------------------------------------------------------------------

  /// The segment's result ends at memory_.partial(0); with chunks, its tree nodes at partial(0), partial(1), ...
  void compute(const Segment& segment) noexcept {
    const std::int64_t begin = std::int64_t{segment.output.first_tile} + segment.tile_begin;
    const std::int64_t end = std::int64_t{segment.output.first_tile} + segment.tile_end;
    if (!chunked()) {
      clear(memory_.partial(0));
      tiles_.run(begin, end, memory_.partial(0));
      return;
    }
    tree_ = ChunkTree(segment.contributor == 0);
    const std::int64_t chunk_tiles = call_.plan.granularity_tiles;
    for (std::int64_t chunk = begin / chunk_tiles; chunk * chunk_tiles < end; ++chunk) {
      const Partial leaf = memory_.partial(tree_.count());
      clear(leaf);
      tiles_.run(max_of(begin, chunk * chunk_tiles), min_of(end, (chunk + 1) * chunk_tiles), leaf);
      tree_.push({.level = 0, .index = chunk}, merge_places());
    }
    if (segment.sole()) tree_.fold(merge_places());
  }

  void clear(const Partial& partial) const noexcept {
    for (std::int32_t r = 0; r < output_.rows; ++r) {
      std::memset(partial.o_row(r), 0, static_cast<std::size_t>(partial.value_stride) * sizeof(float));
      partial.m[r] = softmax::kNegInf;
      partial.l[r] = 0.0F;
    }
  }

  // ---- fix-up -----------------------------------------------------------------------------------------------------

  void copy(const Partial& from, const Partial& to) const noexcept {
    const std::size_t row_bytes = static_cast<std::size_t>(memory_.layout.config.value_dim) * sizeof(float);
    for (std::int32_t r = 0; r < output_.rows; ++r) {
      std::memcpy(to.o_row(r), from.o_row(r), row_bytes);
      to.m[r] = from.m[r];
      to.l[r] = from.l[r];
    }
  }

  void store_partial(const Segment& segment) noexcept {
    store_to_slot(segment);
    track_.note(EventKind::kStored, segment);
  }

  void store_to_slot(const Segment& segment) noexcept {
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

  /// The paper's fix-up: the worker of the first tile waits for the others' partials, and merges.
  void host_or_peer(const Segment& segment) noexcept {
    store_partial(segment);
    if (segment.contributor != 0) {
      fixup::signal<ThreadAtomic>(call_.slots.counter(segment.slots.slot(segment.contributor)));
      return;
    }
    for (std::int32_t c = 1; c < segment.contributors; ++c) {
      fixup::wait_for<ThreadAtomic>(call_.slots.counter(segment.slots.slot(c)));
    }
    merge_whole(segment);
  }

  void merge_if_last(const Segment& segment) noexcept {
    const fixup::Bundling bundling = bundling_for(segment);
    const std::int32_t bundle = segment.contributor / bundling.size;
    const std::int32_t arrivals = bundling.end(bundle, segment.contributors) - bundling.begin(bundle);
    if (!fixup::arrive_last<ThreadAtomic>(call_.slots.counter(segment.slots.slot(bundling.begin(bundle))), arrivals)) return;
    track_.note(EventKind::kMergeBegin, segment);
    merge_bundle(segment, bundling, bundle);
    if (bundling.bundles > 1) {
      track_.note(EventKind::kMergeEnd, segment);
      if (!fixup::arrive_last<ThreadAtomic>(call_.slots.second_counter(segment.slots.slot(0)), bundling.bundles)) return;
      track_.note(EventKind::kMergeBegin, segment);
      merge_bundles(segment, bundling);
    }
    write_output(memory_.partial(0));
    track_.note(EventKind::kMergeEnd, segment);
  }

  /// All partials of the segment's output are there, and nobody else merges them.
  void merge_whole(const Segment& segment) noexcept {
    track_.note(EventKind::kMergeBegin, segment);
    merge_all(segment);
    write_output(memory_.partial(0));
    track_.note(EventKind::kMergeEnd, segment);
  }

  /// All merges of merge_if_last(), by one worker: bits do not depend on the mode.
  void merge_all(const Segment& segment) noexcept {
    const fixup::Bundling bundling = bundling_for(segment);
    for (std::int32_t bundle = 0; bundle < bundling.bundles; ++bundle) merge_bundle(segment, bundling, bundle);
    if (bundling.bundles > 1) merge_bundles(segment, bundling);
  }

  /// The chunk tree has one level for everybody: its shape is the chunks' alone.
  [[nodiscard]] fixup::Bundling bundling_for(const Segment& segment) const noexcept {
    return chunked() ? fixup::Bundling{.size = segment.contributors, .bundles = 1} : fixup::bundling_of(segment.contributors);
  }

  /// The contributors of a bundle, into memory_.partial(0) if it is the only one, else into its place in the second bank.
  void merge_bundle(const Segment& segment, const fixup::Bundling& bundling, std::int32_t bundle) noexcept {
    if (chunked()) return merge_nodes(segment);
    const std::int32_t begin = bundling.begin(bundle);
    const Partial into = bundling.bundles > 1 ? call_.slots.bundle_partial(segment.slots.slot(begin)) : memory_.partial(0);
    merge_parts(into, bundling.end(bundle, segment.contributors) - begin,
                [&](std::int32_t i) { return call_.slots.partial(segment.slots.slot(begin + i)); });
  }

  void merge_bundles(const Segment& segment, const fixup::Bundling& bundling) const noexcept {
    merge_parts(memory_.partial(0), bundling.bundles,
                [&](std::int32_t bundle) { return call_.slots.bundle_partial(segment.slots.slot(bundling.begin(bundle))); });
  }

  /// The nodes of all contributors, from left to right, through one tree more; its root is at memory_.partial(0).
  void merge_nodes(const Segment& segment) noexcept {
    tree_ = ChunkTree(true);
    for (std::int32_t c = 0; c < segment.contributors; ++c) {
      const std::int64_t slot = segment.slots.slot(c);
      const fixup::NodeList& list = call_.slots.node_list(slot);
      for (std::int32_t n = 0; n < list.count; ++n) {
        copy(call_.slots.partial(slot, n), memory_.partial(tree_.count()));
        tree_.push(list.nodes[n], merge_places());
      }
    }
    tree_.fold(merge_places());
  }

  // ---- output -----------------------------------------------------------------------------------------------------

  void write_output(const Partial& whole) noexcept {
    ++done_.outputs;
    const float v_scale = v_scale_of(call_.problem, output_.kv_head.head);
    for (std::int32_t r = 0; r < output_.rows; ++r) {
      const PackedRow row = packed_row(output_.first_row + r, output_.group);
      const float sink = output::row_sink(call_.problem, output_.group, output_.kv_head, row);
      float scale = softmax::output_scale(whole.state(r), sink);
      if (call_.problem.v_scales != nullptr && scale != 0.0F) {  // by itself: the product of both may leave fp32's normal range
        for (std::int32_t d = 0; d < value_dim_of(call_.problem); ++d) whole.o_row(r)[d] *= scale;
        scale = v_scale;
      }
      const std::int64_t offset = output::row_offset(call_.problem, output_.group, output_.lengths, output_.kv_head, row);
      store_row(call_.kernels, call_.problem.o, offset, whole.o_row(r), scale, value_dim_of(call_.problem));
      output::write_lse(call_.problem, output_.group, output_.lengths, output_.kv_head, row, whole.state(r), sink);
    }
  }

  const Call& call_;
  WorkerMemory memory_;
  TileLoop tiles_;
  std::int32_t worker_;
  Done done_;
  TileOutput output_;
  ChunkTree tree_;
  [[no_unique_address]] WorkerTrack track_;
};

}  // namespace

void append_new_tokens(const Call& call, std::int32_t worker) noexcept {
  const WorkerMemory memory(call.memory, call.worker_memory + worker * call.memory.bytes());
  KvTiles tiles(call.problem, call.kernels, memory);
  const std::int32_t group = call.problem.q_heads / call.problem.kv_heads;
  const std::int32_t tile_tokens = call.memory.config.tile_tokens;
  std::int64_t count = 0;  // of tiles, in one order for all workers
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const Sequence& lengths = call.line.lengths()(b);
    const std::int32_t first = first_new_token(call.problem, lengths);
    for (std::int32_t head = 0; first < lengths.kv_end && head < call.problem.kv_heads; ++head) {
      tiles.begin({.lengths = lengths,
                   .kv_head = {b, head},
                   .rows = lengths.q_tokens * group,
                   .group = group,
                   .reach = reach_of(call.problem.scores)});
      for (std::int64_t token = first; token < lengths.kv_end; token += tile_tokens) {
        if (count++ % call.plan.workers != worker) continue;
        static_cast<void>(tiles.locate(token, static_cast<std::int32_t>(min_of(tile_tokens, lengths.kv_end - token))));
      }
    }
  }
  ++call.done[worker].passes;
}

void run_worker(const Call& call, std::int32_t worker) noexcept { Worker(call, worker).run(); }

void merge_shared_outputs(const Call& call, std::int32_t worker) noexcept { Worker(call, worker).merge_shared(); }

}  // namespace lean::cpu

// ChunkTree: the fixed binary tree that makes merged bits independent of who computed what.
//
// Chunk c of a sequence is leaf c; node (level, i) covers chunks [i 2^level, (i + 1) 2^level); a missing child hands the other
// one up unchanged: on the right where the sequence ends, on the left where a window begins. A worker pushes its chunks in
// order: whenever the two newest nodes are siblings they merge. What is left are the maximal nodes of its range, at most
// 2 log2(chunks); pushing all workers' nodes in order gives the root. The tree decides every merge, so any cut between chunks
// gives the same bits.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::fixup {

struct ChunkNode {
  std::int32_t level = 0;
  std::int64_t index = 0;
};

class ChunkTree {
 public:
  static constexpr std::int32_t kMaxNodes = 64;  // 2 log2 of 2^31 chunks

  ChunkTree() = default;
  /// `begins_output`: the first node pushed has nothing to its left.
  LEAN_HD explicit constexpr ChunkTree(bool begins_output) noexcept : begins_output_(begins_output) {}

  /// Adds the node to the right of all others; its partial lies at stack place count(). `merge(left, right)` merges the partial
  /// at stack place `right` into the one at `left`.
  template <typename TMerge>
  LEAN_HD constexpr void push(ChunkNode node, TMerge&& merge) noexcept {
    nodes_[count_++] = node;
    while (true) {
      if (count_ >= 2 && siblings(nodes_[count_ - 2], nodes_[count_ - 1])) {
        merge_top(merge);
      } else if (count_ == 1 && begins_output_ && nodes_[0].index % 2 != 0) {
        nodes_[0] = {nodes_[0].level + 1, nodes_[0].index / 2};
      } else {
        return;
      }
    }
  }

  /// Merges what is left, right to left: the tree's ragged right edge. One node remains.
  template <typename TMerge>
  LEAN_HD constexpr void fold(TMerge&& merge) noexcept {
    while (count_ >= 2) merge_top(merge);
  }

  [[nodiscard]] LEAN_HD constexpr std::int32_t count() const noexcept { return count_; }
  [[nodiscard]] LEAN_HD constexpr ChunkNode node(std::int32_t place) const noexcept { return nodes_[place]; }

 private:
  [[nodiscard]] LEAN_HD static constexpr bool siblings(ChunkNode left, ChunkNode right) noexcept {
    return left.level == right.level && left.index % 2 == 0 && left.index + 1 == right.index;
  }

  template <typename TMerge>
  LEAN_HD constexpr void merge_top(TMerge&& merge) noexcept {
    merge(count_ - 2, count_ - 1);
    nodes_[count_ - 2] = {nodes_[count_ - 2].level + 1, nodes_[count_ - 2].index / 2};
    --count_;
  }

  ChunkNode nodes_[kMaxNodes] = {};
  std::int32_t count_ = 0;
  bool begins_output_ = false;
};

/// What ChunkTree::push() makes of a node.
struct ChunkPush {
  std::int32_t merges = 0;  // with this many nodes below it
  ChunkNode node;           // the one that is left
};

/// What ChunkTree::push() makes of `node`, without a stack: one would hold the nodes of all chunks from `first` up to the node,
/// and nothing else.
LEAN_HD [[nodiscard]] constexpr ChunkPush push_after(std::int64_t first, bool begins_output, ChunkNode node) noexcept {
  ChunkPush push{.node = node};
  while (push.node.index % 2 != 0) {
    const std::int64_t begin = push.node.index << push.node.level;
    const std::int64_t sibling_begin = (push.node.index - 1) << push.node.level;
    if (begins_output ? begin > first : sibling_begin >= first) {
      ++push.merges;
    } else if (!begins_output) {
      break;
    }
    push.node = {push.node.level + 1, push.node.index / 2};
  }
  return push;
}

/// Nodes that can be on the stack at once for a sequence of `chunks` chunks.
LEAN_HD [[nodiscard]] constexpr std::int32_t max_chunk_nodes(std::int64_t chunks) noexcept {
  std::int32_t levels = 1;
  while ((std::int64_t{1} << levels) < chunks) ++levels;
  return 2 * levels + 1;
}

}  // namespace lean::fixup

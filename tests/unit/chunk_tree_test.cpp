// ChunkTree: one order of merges, whatever range of chunks each worker had. Merges are recorded as expressions, so that
// two results are equal exactly when every merge met the same operands.
#include "fixup/chunk_tree.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using support::full_or_reduced;
using support::Stream;

[[nodiscard]] std::int32_t ceil_log2(std::int64_t x) {
  std::int32_t levels = 0;
  while ((std::int64_t{1} << levels) < x) ++levels;
  return levels;
}

/// Expressions "(left right)" by number: equal numbers, equal expressions. Leaf c is c, as long as there are kLeaves.
class Expressions {
 public:
  static constexpr std::int64_t kLeaves = std::int64_t{1} << 20;

  std::int64_t merge(std::int64_t left, std::int64_t right) {
    const auto key = (static_cast<std::uint64_t>(left) << 32) | static_cast<std::uint64_t>(right);
    return merged_.try_emplace(key, kLeaves + static_cast<std::int64_t>(merged_.size())).first->second;
  }

  /// The tree's definition, from the root down: node (level, index) over chunks [index 2^level, (index + 1) 2^level);
  /// -1 when there are none of [first, end); a missing child hands the other one up.
  std::int64_t node(std::int64_t first, std::int64_t end, std::int32_t level, std::int64_t index) {
    if ((index << level) >= end || ((index + 1) << level) <= first) return -1;
    if (level == 0) return index;
    const std::int64_t left = node(first, end, level - 1, 2 * index);
    const std::int64_t right = node(first, end, level - 1, 2 * index + 1);
    if (left < 0 || right < 0) return left < 0 ? right : left;
    return merge(left, right);
  }

  std::int64_t root(std::int64_t chunks, std::int64_t first = 0) { return node(first, chunks, ceil_log2(chunks), 0); }

 private:
  std::unordered_map<std::uint64_t, std::int64_t> merged_;
};

/// A stack of expressions run by a ChunkTree, as a worker runs one over partials. push_after() must say the same without it.
struct Stack {
  Expressions& expressions;
  ChunkTree tree;
  std::vector<std::int64_t> places;
  std::int32_t most_places = 0;
  bool begins_output;
  std::int64_t first = 0;

  Stack(Expressions& shared, bool begins)
      : expressions(shared), tree(begins), places(ChunkTree::kMaxNodes + 1), begins_output(begins) {}

  [[nodiscard]] auto merger() {
    return [this](std::int32_t left, std::int32_t right) {
      ASSERT_EQ(left + 1, right);
      ASSERT_EQ(right + 1, tree.count());
      auto& into = places[static_cast<std::size_t>(left)];
      into = expressions.merge(into, places[static_cast<std::size_t>(right)]);
    };
  }
  void push(ChunkNode node, std::int64_t expression) {
    if (tree.count() == 0) first = node.index << node.level;
    const std::int32_t before = tree.count();
    const ChunkPush known = push_after(first, begins_output, node);
    places[static_cast<std::size_t>(before)] = expression;
    most_places = std::max(most_places, before + 1);
    tree.push(node, merger());
    ASSERT_EQ(tree.count(), before + 1 - known.merges);
    ASSERT_EQ(tree.node(tree.count() - 1).level, known.node.level);
    ASSERT_EQ(tree.node(tree.count() - 1).index, known.node.index);
  }
  std::int64_t fold() {
    tree.fold(merger());
    return places[0];
  }
};

/// The whole sequence by workers of [cuts[i], cuts[i + 1]), their nodes merged in order.
std::int64_t merged_by_workers(Expressions& expressions, const std::vector<std::int64_t>& cuts) {
  const std::int64_t chunks = cuts.back();
  Stack whole(expressions, true);
  for (std::size_t worker = 0; worker + 1 < cuts.size(); ++worker) {
    Stack own(expressions, cuts[worker] == cuts.front());
    for (std::int64_t chunk = cuts[worker]; chunk < cuts[worker + 1]; ++chunk) own.push({.level = 0, .index = chunk}, chunk);
    EXPECT_LE(own.tree.count(), max_chunk_nodes(chunks));
    EXPECT_LE(own.most_places, max_chunk_nodes(chunks) + 1);  // what the backend has memory for
    for (std::int32_t n = 0; n < own.tree.count(); ++n) whole.push(own.tree.node(n), own.places[static_cast<std::size_t>(n)]);
  }
  EXPECT_LE(whole.most_places, max_chunk_nodes(chunks) + 1);
  const std::int64_t result = whole.fold();
  EXPECT_EQ(whole.tree.count(), 1);
  return result;
}

TEST(ChunkTree, R44_OneWorkerFollowsTheDefinition) {
  for (std::int64_t chunks = 1; chunks <= 300; ++chunks) {
    Expressions expressions;
    ASSERT_EQ(merged_by_workers(expressions, {0, chunks}), expressions.root(chunks)) << chunks;
  }
}

TEST(ChunkTree, R44_EveryRangeUpTo64ChunksMergesInTheSameOrder) {
  for (std::int64_t chunks = 1; chunks <= 64; ++chunks) {
    Expressions expressions;
    const std::int64_t root = expressions.root(chunks);
    for (std::int64_t begin = 0; begin <= chunks; ++begin) {
      for (std::int64_t end = begin; end <= chunks; ++end) {
        ASSERT_EQ(merged_by_workers(expressions, {0, begin, end, chunks}), root) << chunks << ": " << begin << ", " << end;
      }
    }
  }
}

TEST(ChunkTree, R44_EverySetOfCutsOfFewChunksMergesInTheSameOrder) {
  for (std::int64_t chunks = 1; chunks <= full_or_reduced(15, 10); ++chunks) {
    Expressions expressions;
    const std::int64_t root = expressions.root(chunks);
    for (std::uint64_t set = 0; set < std::uint64_t{1} << (chunks - 1); ++set) {  // bit c: a cut behind chunk c
      std::vector<std::int64_t> cuts{0};
      for (std::int64_t c = 0; c + 1 < chunks; ++c) {
        if ((set >> c & 1U) != 0) cuts.push_back(c + 1);
      }
      cuts.push_back(chunks);
      ASSERT_EQ(merged_by_workers(expressions, cuts), root) << chunks << " chunks, cuts " << set;
    }
  }
}

/// A window: the chunks before `first` are missing, and the merges of the others stay what they are in the whole tree.
TEST(ChunkTree, R44_EveryRangeOfAWindowMergesInTheSameOrder) {
  for (std::int64_t chunks = 1; chunks <= full_or_reduced(40, 20); ++chunks) {
    for (std::int64_t first = 0; first < chunks; ++first) {
      Expressions expressions;
      const std::int64_t root = expressions.root(chunks, first);
      for (std::int64_t begin = first; begin <= chunks; ++begin) {
        for (std::int64_t end = begin; end <= chunks; ++end) {
          ASSERT_EQ(merged_by_workers(expressions, {first, begin, end, chunks}), root)
              << "[" << first << ", " << chunks << "): " << begin << ", " << end;
        }
      }
    }
  }
}

TEST(ChunkTree, R44_RandomCutsOfLongSequencesMergeInTheSameOrder) {
  for (std::uint64_t seed = 1; seed <= full_or_reduced(200U, 20U); ++seed) {
    Stream random(seed);
    const std::int64_t chunks = random.between(65, random.chance(10) ? 100'000 : 3'000);
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t worker = random.between(1, 40); worker > 0; --worker) cuts.push_back(random.between(0, chunks));
    cuts.push_back(chunks);
    std::sort(cuts.begin(), cuts.end());
    Expressions expressions;
    ASSERT_EQ(merged_by_workers(expressions, cuts), expressions.root(chunks)) << "seed " << seed;
  }
}

TEST(ChunkTree, ARangeKeepsAtMostTwoNodesALevel) {
  for (std::int64_t chunks = 2; chunks <= full_or_reduced(257, 65); ++chunks) {
    const std::int32_t levels = ceil_log2(chunks);
    for (std::int64_t begin = 0; begin < chunks; ++begin) {
      ChunkTree tree;
      for (std::int64_t chunk = begin; chunk < chunks; ++chunk) {
        tree.push({.level = 0, .index = chunk}, [](std::int32_t, std::int32_t) {});
        ASSERT_LE(tree.count(), 2 * levels) << "[" << begin << ", " << chunk + 1 << ") of " << chunks;
      }
    }
    ASSERT_LE(2 * levels, max_chunk_nodes(chunks));
  }
}

TEST(ChunkTree, TheLongestSequenceFitsTheStack) {
  constexpr std::int64_t kChunks = std::int64_t{1} << 31;
  static_assert(max_chunk_nodes(kChunks) + 1 <= ChunkTree::kMaxNodes);
  // [1, 2^31 - 1): the range with the most maximal nodes, left edge rising, right edge falling.
  ChunkTree tree;
  const auto never = [](std::int32_t, std::int32_t) { FAIL() << "maximal nodes have no siblings among them"; };
  for (std::int32_t level = 0; level < 30; ++level) tree.push({.level = level, .index = 1}, never);
  for (std::int32_t level = 29; level >= 0; --level)
    tree.push({.level = level, .index = (std::int64_t{1} << (31 - level)) - 2}, never);
  EXPECT_EQ(tree.count(), 60);
  EXPECT_LE(tree.count(), max_chunk_nodes(kChunks));
}

}  // namespace
}  // namespace lean::fixup

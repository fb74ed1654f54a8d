// Two launches of one call that run side by side on a GPU: prompts' chunks, whose tiles take their products, and sequences of few
// queries, whose tiles take their read. Each has workers of its own, so many that both end together by a model of what they take; or
// one has all of them after the other, where that is less. Shares follow from all lengths. A launch's workers agree on them, since they
// run the same code; the two launches' kernels are compiled apart and may round differently. Each goes by its own number alone, and so
// many workers compute all its sequences: where the numbers do not fit together, CTAs wait for a multiprocessor or leave one idle.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "problem/reach.hpp"
#include "schedule/level_line.hpp"
#include "schedule/line_shape.hpp"

namespace lean::schedule {

/// What a row block takes one worker, in us.
struct BlockTime {
  float token = 0.0F;  // each key token that it sees
  float ends = 0.0F;   // beside its tiles: queries, rows on their way out
};

/// What either launch has to do, for one kv head of every sequence or for all of them. Numbers of tokens need be near only.
struct SideSums {
  float blocks = 0.0F;        // row blocks of chunks
  float block_tokens = 0.0F;  // key tokens that they see, each for itself
  float chunk_keys = 0.0F;    // key tokens that chunks see
  float steps = 0.0F;         // sequences of few queries
  float step_tokens = 0.0F;   // key tokens that they see

  [[nodiscard]] LEAN_HD constexpr SideSums plus(const SideSums& other) const noexcept {
    return {blocks + other.blocks, block_tokens + other.block_tokens, chunk_keys + other.chunk_keys, steps + other.steps,
            step_tokens + other.step_tokens};
  }
  [[nodiscard]] LEAN_HD constexpr SideSums times(float heads) const noexcept {
    return {blocks * heads, block_tokens * heads, chunk_keys * heads, steps * heads, step_tokens * heads};
  }
};

/// Workers of either launch. Both may be all of them: then the steps' come when the chunks' have ended.
struct SideWorkers {
  std::int32_t chunks = 0;
  std::int32_t steps = 0;
};

/// A number of workers for the chunks, and what orders such by their time.
struct SideChoice {
  float time = 3.0e38F;
  std::int32_t of_chunks = 1;

  [[nodiscard]] LEAN_HD constexpr SideChoice better(const SideChoice& other) const noexcept {
    const bool same = other.time == time;
    return other.time < time || (same && other.of_chunks < of_chunks) ? other : *this;
  }
};

struct SideBySide {
  static constexpr std::int32_t kLooks = 32;  // a GPU's warp

  std::int32_t workers = 0;     // of both launches together, two or more; 0: nothing runs beside a launch
  std::int32_t few_tokens = 0;  // query tokens of a sequence that is a step's, at most
  std::int32_t chunk_rows = 0;  // rows of a chunk's row block
  BlockTime chunks{};
  BlockTime steps{};
  float chunk_start = 0.0F;  // us, of a launch, until its first tile
  float step_start = 0.0F;
  float cut = 0.0F;         // us, what ends cut anywhere take more than level ones (level_line.hpp)
  float read = 0.0F;        // us, in which the memory gives K and V of a token of one kv head
  float far_tokens = 0.0F;  // of all heads: K and V of more are read anew by row blocks that are cut anywhere

  [[nodiscard]] LEAN_HD constexpr SideSums sums_of(const SequenceWork& work, std::int32_t group, Reach reach) const noexcept {
    if (work.q_tokens <= 0) return {};
    const KeySpan all = keys_seen(reach, work.kv_tokens, work.q_tokens, 0, work.q_tokens - 1);
    const auto keys = static_cast<float>(max_of(0, all.end - all.begin));
    if (work.q_tokens <= few_tokens) return {.steps = 1.0F, .step_tokens = keys};
    const std::int32_t middle = work.q_tokens / 2;  // sees what a row block does in the mean
    const KeySpan seen = keys_seen(reach, work.kv_tokens, work.q_tokens, middle, middle);
    const float blocks = rounded_up(static_cast<float>(work.q_tokens) * static_cast<float>(group) / static_cast<float>(chunk_rows));
    return {.blocks = blocks, .block_tokens = blocks * static_cast<float>(max_of(0, seen.end - seen.begin)), .chunk_keys = keys};
  }

  /// What so many workers for the chunks come to, where there are both; all of them: one launch after the other.
  [[nodiscard]] LEAN_HD constexpr SideChoice choice_of(const SideSums& sums, std::int32_t of_chunks) const noexcept {
    return {of_chunks < workers ? cubed_time(sums, of_chunks) : cube(time_in_turn(sums)), of_chunks};
  }
  /// Numbers that kLooks lanes, or turns, look at: first such as lie evenly between 1 and all, then neighbours of the best of these. A
  /// number far from those neighbours is missed, however good it is, if it lies between two of the first: level deals make some that are
  /// better than all within 2 to 4 workers of them (docs/notebook/chunks-prefill-append.md).
  [[nodiscard]] LEAN_HD constexpr std::int32_t even_look(std::int32_t look) const noexcept {
    return 1 + look * (workers - 1) / (kLooks - 1);
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t near_look(std::int32_t look, std::int32_t best) const noexcept {
    return min_of(max_of(1, best - kLooks / 2 + look), workers);
  }
  /// The shares, by sums over all sequences and heads, and the best of the choices that were looked at.
  [[nodiscard]] LEAN_HD constexpr SideWorkers shares(const SideSums& sums, const SideChoice& best) const noexcept {
    if (!has_both(sums)) return {.chunks = sums.blocks > 0.0F ? workers : 0, .steps = sums.blocks > 0.0F ? 0 : workers};
    return {best.of_chunks, best.of_chunks < workers ? workers - best.of_chunks : workers};
  }
  [[nodiscard]] constexpr SideWorkers shares(const SideSums& sums) const noexcept {
    SideChoice best;
    if (!has_both(sums)) return shares(sums, best);
    for (std::int32_t look = 0; look < kLooks; ++look) best = best.better(choice_of(sums, even_look(look)));
    SideChoice nearest = best;
    for (std::int32_t look = 0; look < kLooks; ++look) nearest = nearest.better(choice_of(sums, near_look(look, best.of_chunks)));
    return shares(sums, nearest);
  }

  [[nodiscard]] LEAN_HD static constexpr bool has_both(const SideSums& sums) noexcept {
    return sums.blocks > 0.0F && sums.steps > 0.0F;
  }

  /// us of both, the one with so many workers beside the other with the rest, to the third power.
  [[nodiscard]] LEAN_HD constexpr float cubed_time(const SideSums& sums, std::int32_t of_chunks) const noexcept {
    const ChunkTime chunk = chunk_time(sums, of_chunks);
    const auto others = static_cast<float>(workers - of_chunks);
    const float rest = others / static_cast<float>(workers);
    const float slower = 1.0F + kCrowded * cube(rest);
    const float step = step_start + step_work(sums) / others;
    // Few workers read at rates of their own, many at the memory's, which the sum of cubes says of those between.
    const float memory = (sums.step_tokens + chunk.read_tokens) * read;
    return max_of(cube(chunk_start + chunk.time * slower), cube(step) + cube(memory));
  }
  /// us of one after the other, each with all workers.
  [[nodiscard]] LEAN_HD constexpr float time_in_turn(const SideSums& sums) const noexcept {
    const float step = step_start + step_work(sums) / static_cast<float>(workers);
    return chunk_start + chunk_time(sums, workers).time + max_of(step, sums.step_tokens * read);
  }

 private:
  struct ChunkTime {
    float time = 0.0F;
    float read_tokens = 0.0F;  // that come from memory
  };

  /// A chunk's tiles wait for their K and V behind all that the steps' workers have asked for: with as good as all workers 1.4 times as
  /// long (docs/notebook/chunks-prefill-append.md).
  static constexpr float kCrowded = 0.4F;
  static constexpr std::int32_t kMostParts = 4;  // of the kMostLevelParts that a line may have: each is one more turn of every look
  static_assert(kMostParts <= kMostLevelParts);
  static constexpr float kFarWorth =
      1.0F + 1.0F / (1 << kFarWorthLog2);  // level shares of long keys may take so much of cut ones' time

  [[nodiscard]] LEAN_HD static constexpr float cube(float x) noexcept { return x * x * x; }
  /// us of one worker.
  [[nodiscard]] LEAN_HD constexpr float step_work(const SideSums& sums) const noexcept {
    return sums.steps * steps.ends + sums.step_tokens * steps.token;
  }
  [[nodiscard]] LEAN_HD static constexpr float rounded_down(float x) noexcept {
    return static_cast<float>(static_cast<std::int32_t>(x));
  }
  [[nodiscard]] LEAN_HD static constexpr float rounded_up(float x) noexcept {
    return rounded_down(x) < x ? rounded_down(x) + 1.0F : rounded_down(x);
  }

  /// By shares cut anywhere, or level: each row block in so many equal parts, a worker so many of them. Several row blocks of long keys
  /// may have up to kMostParts, others as many as have a worker of their own (level_line.hpp, which tries more of the former).
  [[nodiscard]] LEAN_HD constexpr ChunkTime chunk_time(const SideSums& sums, std::int32_t of_chunks) const noexcept {
    const auto n = static_cast<float>(of_chunks);
    const float blocks_each = sums.blocks / n;
    const float tokens = sums.block_tokens / sums.blocks * chunks.token;  // a block's, in us
    const bool far = sums.chunk_keys > far_tokens && sums.block_tokens >= 2.0F * sums.chunk_keys;
    const bool one_each = sums.blocks <= n;
    const float cut_time = blocks_each * (tokens + chunks.ends) + cut;
    float level = rounded_up(blocks_each) * (tokens + chunks.ends);
    if (one_each) level = tokens / rounded_down(n / sums.blocks) + chunks.ends;
    if (far) {
      for (std::int32_t parts = 2; parts <= kMostParts; ++parts) {
        const auto p = static_cast<float>(parts);
        level = min_of(level, rounded_up(blocks_each * p) * (tokens / p + chunks.ends));
      }
    }
    const float most = far ? cut_time * kFarWorth : cut_time;
    if (level <= most) return {level, sums.chunk_keys};
    return {cut_time, far && one_each ? sums.block_tokens : sums.chunk_keys};
  }
};

}  // namespace lean::schedule

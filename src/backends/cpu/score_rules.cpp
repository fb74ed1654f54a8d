#include "backends/cpu/score_rules.hpp"

#include <algorithm>
#include <cstring>

#include "base/int_math.hpp"
#include "base/with_type.hpp"
#include "problem/tree_mask.hpp"
#include "softmax/state.hpp"
#include "tile/score_rules.hpp"

namespace lean::cpu {
namespace {

[[nodiscard]] float additive_bias(const Scores& scores, std::int64_t offset) noexcept {
  float bias = 0.0F;
  with_query_type(scores.mask_dtype, [&]<typename T>(T) { bias = to_float(static_cast<const T*>(scores.mask)[offset]); });
  return bias;
}

}  // namespace

ScoreRules::ScoreRules(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory) noexcept
    : problem_(problem),
      kernels_(kernels),
      memory_(memory),
      any_(problem.scores.softcap > 0.0F || problem.scores.alibi_slopes != nullptr || hides_tokens(problem.scores)) {}

bool ScoreRules::apply(const TileOutput& output, float scale, KvTile& tile, const RowBuffer& scores) const noexcept {
  if (!any_ && !tile.has_absent) return false;
  const bool masked = masks(output, tile);
  if (masked) std::memset(tile.tables->hidden, 1, static_cast<std::size_t>(tile.tokens));
  for (std::int32_t r = 0; r < scores.rows; ++r) {
    const PackedRow at = output.row(r);
    const KeySpan seen = output.seen_by(at.token);
    const auto begin = static_cast<std::int32_t>(clamp_to(seen.begin - tile.token, 0, tile.tokens));
    const auto end = static_cast<std::int32_t>(clamp_to(seen.end - tile.token, begin, tile.tokens));
    ScoreRule rule{.scale = scale, .cap = tile::log2_cap(problem_.scores), .seen_begin = begin};
    if (problem_.scores.alibi_slopes != nullptr) {
      const std::int64_t position = query_position(output.lengths, at.token);
      rule.slope = tile::log2_slope(problem_.scores, output.q_head(at));
      rule.distance =
          static_cast<std::int32_t>(clamp_to(tile.token - position, -INT32_MAX, INT32_MAX - tile.tokens - kLaneMultiple));
    }
    if (masked) {
      fill_bias(output, at, tile, begin, end);
      rule.bias = memory_.bias;
    }
    kernels_.apply_rule(scores.row(r), end, rule);  // what lies behind may not have been computed, and is hidden
  }
  if (masked && std::memchr(tile.tables->hidden, 1, static_cast<std::size_t>(tile.tokens)) != nullptr) KvTiles::hide_values(tile);
  return true;
}

bool ScoreRules::masks(const TileOutput& output, const KvTile& tile) const noexcept {
  if (problem_.scores.mask != nullptr || tile.has_absent) return true;
  return problem_.scores.tree_mask != nullptr && tile.token + tile.tokens > first_draft(output.lengths);
}

/// The bias of tokens [begin, end) of the tile; the others are not looked up. Tokens that the row sees are no longer hidden.
void ScoreRules::fill_bias(const TileOutput& output, PackedRow at, const KvTile& tile, std::int32_t begin,
                           std::int32_t end) const noexcept {
  std::fill_n(memory_.bias, memory_.layout.score_stride(), 0.0F);
  for (std::int32_t t = begin; t < end; ++t) {
    const bool absent = tile.has_absent && KvTiles::is_hidden(tile.k.row(t));
    const float bias = absent
                           ? softmax::kNegInf
                           : tile::mask_bias(problem_, output.lengths, output.q_head(at), at.token, tile.token + t, additive_bias);
    memory_.bias[t] = bias;
    if (bias != softmax::kNegInf) tile.tables->hidden[t] = 0;
  }
}

}  // namespace lean::cpu

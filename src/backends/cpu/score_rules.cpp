#include "backends/cpu/score_rules.hpp"

#include <algorithm>
#include <cstring>

#include "base/int_math.hpp"
#include "base/with_type.hpp"
#include "problem/address.hpp"
#include "problem/tree_mask.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"
#include "tile/score_rules.hpp"

namespace lean::cpu {
namespace {

/// row[t] = value(the mask's element of token t), elements `stride` apart. Where they lie side by side the compiler takes many at once.
template <typename T, typename TValue>
void read_mask(const T* mask, std::int64_t stride, std::int32_t tokens, float* row, const TValue& value) noexcept {
  if (stride == 1) {
    for (std::int32_t t = 0; t < tokens; ++t) row[t] = value(mask[t]);
  } else {
    for (std::int32_t t = 0; t < tokens; ++t) row[t] = value(mask[t * stride]);
  }
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

/// The bias of tokens [begin, end) of the tile; the others are not looked up. Tokens that the row sees are no longer hidden. What kind
/// of mask there is, is asked once a row, as tile::mask_bias() asks for each key.
void ScoreRules::fill_bias(const TileOutput& output, PackedRow at, const KvTile& tile, std::int32_t begin,
                           std::int32_t end) const noexcept {
  const Scores& scores = problem_.scores;
  const HeadPosition q_head = output.q_head(at);
  float* bias = memory_.bias;
  std::fill_n(bias, memory_.layout.score_stride(), 0.0F);
  const std::int64_t offset = mask_offset(scores.mask_strides, q_head, at.token, tile.token + begin);
  const std::int64_t stride = scores.mask_strides.dim;
  if (scores.mask != nullptr && scores.mask_is_boolean) {
    const auto of_byte = [](std::uint8_t seen) { return seen != 0 ? 0.0F : softmax::kNegInf; };
    read_mask(static_cast<const std::uint8_t*>(scores.mask) + offset, stride, end - begin, bias + begin, of_byte);
  } else if (scores.mask != nullptr) {
    with_query_type(scores.mask_dtype, [&]<typename T>(T) {
      const auto of_number = [](T number) { return softmax::to_log2(to_float(number)); };
      read_mask(static_cast<const T*>(scores.mask) + offset, stride, end - begin, bias + begin, of_number);
    });
  }
  const std::int64_t draft = scores.tree_mask != nullptr ? first_draft(output.lengths) - tile.token : end;
  for (auto t = static_cast<std::int32_t>(clamp_to(draft, begin, end)); t < end; ++t) {
    if (!sees_in_tree(problem_, output.lengths, q_head.sequence, at.token, tile.token + t)) bias[t] = softmax::kNegInf;
  }
  for (std::int32_t t = begin; tile.has_absent && t < end; ++t) {
    if (KvTiles::is_hidden(tile.k.row(t))) bias[t] = softmax::kNegInf;
  }
  std::uint8_t* hidden = tile.tables->hidden;
  for (std::int32_t t = begin; t < end; ++t) hidden[t] = static_cast<std::uint8_t>(hidden[t] & (bias[t] == softmax::kNegInf));
}

}  // namespace lean::cpu

// Inputs that cannot hide an error: scores with a peak at a random place in every short run of tokens, maxima that rise or fall
// along the line, V whose tiles carry a signature, equal scores over equal values, where every rounding of a sum goes the same
// way, and data with an exact answer. An element depends on its key (sequence identity, head, token, dim, seed) alone. Query
// tokens are keyed by their distance from the last one, so that a token keeps its data whatever n_q is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "support/case.hpp"
#include "support/random.hpp"

namespace lean::support {

class InputPattern {
 public:
  explicit InputPattern(const Case& c) : case_(c), group_(c.q_heads / c.kv_heads) {}

  /// `from_last` = n_q - 1 - token.
  void q_row(std::int64_t id, std::int32_t head, std::int64_t from_last, std::span<double> row) const {
    if (case_.input == Input::kUniform || case_.input == Input::kFlat) return std::fill(row.begin(), row.end(), 0.0);
    fill_normal(key_of({seed(), 1, id, head, from_last}), row);
    for (double& x : row) x *= static_cast<double>(case_.q_std);
    if (steered()) steer(row, 0.25, head / group_, 1.0);
  }

  void k_row(std::int64_t id, std::int32_t head, std::int64_t token, std::span<double> row) const {
    fill_normal(key_of({seed(), 2, id, head, case_.input == Input::kEqual ? 0 : token}), row);
    if (steered()) steer(row, 0.5, head, steered_score(id, head, token) / std::sqrt(static_cast<double>(case_.head_dim)));
  }

  void v_row(std::int64_t id, std::int32_t head, std::int64_t token, std::span<double> row) const {
    const std::uint64_t key = key_of({seed(), 3, id, head, token});
    if (case_.input == Input::kUniform) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<double>(pick(key + i, 17) - 8);
      return;
    }
    if (case_.input == Input::kFlat) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = 0.1 + uniform(key_of({seed(), 8, static_cast<std::int64_t>(i)}));
      return;
    }
    fill_normal(key, row);
    if (case_.input == Input::kNormal || case_.input == Input::kOneHot || case_.input == Input::kEqual) return;
    const std::uint64_t signature = key_of({seed(), 4, id, head, token / kSignatureTokens});
    for (std::size_t i = 0; i < row.size(); ++i) row[i] += (mix(signature + i) & 1U) != 0 ? kSignature : -kSignature;
  }

  /// The token whose V row is the whole answer of a kOneHot case, for a sequence that sees [begin, end).
  [[nodiscard]] std::int64_t hot_token(std::int64_t id, std::int32_t head) const {
    const auto sequence = static_cast<std::size_t>(id);
    const std::int64_t begin = sequence < case_.pad.size() ? case_.pad[sequence] : 0;
    return begin + pick(key_of({seed(), 6, id, head}), case_.lens[sequence] - begin);
  }

 private:
  static constexpr std::int64_t kSignatureTokens = 16;  // the smallest LeanTile
  static constexpr double kSignature = 4.0;
  static constexpr std::int64_t kPeakEvery = 61;  // tokens: every worker's range has several

  [[nodiscard]] std::int64_t seed() const { return static_cast<std::int64_t>(case_.seed); }

  /// Scores are set token by token, along one direction that queries and keys of a kv head share.
  [[nodiscard]] bool steered() const {
    return case_.input == Input::kPeaks || case_.input == Input::kAscending || case_.input == Input::kDescending ||
           case_.input == Input::kOneHot;
  }

  /// row = noise row + along x the direction of a kv head; one-hot data has no noise.
  void steer(std::span<double> row, double noise, std::int32_t kv_head, double along) const {
    const std::uint64_t direction = key_of({seed(), 5, kv_head});
    const double kept = case_.input == Input::kOneHot ? 0.0 : noise;
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = kept * row[i] + ((mix(direction + i) & 1U) != 0 ? along : -along);
    }
  }

  /// The score of a token but for noise, with the default scale.
  [[nodiscard]] double steered_score(std::int64_t id, std::int32_t head, std::int64_t token) const {
    const auto length = static_cast<double>(case_.lens[static_cast<std::size_t>(id) % case_.lens.size()]);
    const double place = static_cast<double>(token) / length;
    if (case_.input == Input::kAscending) return -8.0 + 16.0 * place;
    if (case_.input == Input::kDescending) return 8.0 - 16.0 * place;
    if (case_.input == Input::kOneHot) return token == hot_token(id, head) ? 200.0 : -200.0;
    const std::uint64_t run = key_of({seed(), 7, id, head, token / kPeakEvery});
    return pick(run, kPeakEvery) == token % kPeakEvery ? 4.0 + 6.0 * uniform(run) : -1.0;
  }

  const Case& case_;
  std::int32_t group_;
};

}  // namespace lean::support

// Inputs that cannot hide an error: scores with a peak at a random place in every short run of tokens, maxima that rise
// or fall along the line, V whose tiles carry a signature, and data with an exact answer. An element depends on its
// key (sequence identity, head, token, dim, seed) alone. Query tokens are keyed by their distance from the last one,
// so that a token keeps its data whatever n_q is.
#pragma once

#include <cmath>
#include <cstdint>

#include "support/case.hpp"
#include "support/random.hpp"

namespace lean::support {

class InputPattern {
 public:
  explicit InputPattern(const Case& c) : case_(c), group_(c.q_heads / c.kv_heads) {}

  /// `from_last` = n_q - 1 - token.
  [[nodiscard]] double q(std::int64_t id, std::int32_t head, std::int64_t from_last, std::int32_t dim) const {
    if (case_.input == Input::kUniform) return 0.0;
    const double noise = normal(key_of({seed(), 1, id, head, from_last}), dim) * static_cast<double>(case_.q_std);
    if (!steered()) return noise;
    return direction(head / group_, dim) + (case_.input == Input::kOneHot ? 0.0 : 0.25 * noise);
  }

  [[nodiscard]] double k(std::int64_t id, std::int32_t head, std::int64_t token, std::int32_t dim) const {
    const std::int64_t source = case_.input == Input::kEqual ? 0 : token;
    const double noise = normal(key_of({seed(), 2, id, head, source}), dim);
    if (!steered()) return noise;
    const double along = steered_score(id, head, token) / std::sqrt(static_cast<double>(case_.head_dim));
    return along * direction(head, dim) + (case_.input == Input::kOneHot ? 0.0 : 0.5 * noise);
  }

  [[nodiscard]] double v(std::int64_t id, std::int32_t head, std::int64_t token, std::int32_t dim) const {
    const std::uint64_t key = key_of({seed(), 3, id, head, token});
    if (case_.input == Input::kUniform) return static_cast<double>(pick(key ^ mix(static_cast<std::uint64_t>(dim)), 17) - 8);
    const double noise = normal(key, dim);
    if (case_.input == Input::kNormal || case_.input == Input::kOneHot || case_.input == Input::kEqual) return noise;
    const bool up = (mix(key_of({seed(), 4, id, head, token / kSignatureTokens, dim})) & 1U) != 0;
    return noise + (up ? kSignature : -kSignature);
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
  static constexpr std::int64_t kPeakEvery = 61;        // tokens: every worker's range has several

  [[nodiscard]] std::int64_t seed() const { return static_cast<std::int64_t>(case_.seed); }

  /// Scores are set token by token, along one direction that queries and keys of a kv head share.
  [[nodiscard]] bool steered() const {
    return case_.input == Input::kPeaks || case_.input == Input::kAscending || case_.input == Input::kDescending ||
           case_.input == Input::kOneHot;
  }

  [[nodiscard]] double direction(std::int32_t head, std::int32_t dim) const {
    return (mix(key_of({seed(), 5, head, dim})) & 1U) != 0 ? 1.0 : -1.0;
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

// A turned tile on AMX (TurnedTile, tile_kernels.hpp): K and V are laid out as second factors of tdpbf16ps once for all rows of a
// block, which then go through scores, softmax and accumulate 32 at a time. Two by two registers of sums: each factor that is loaded
// is multiplied twice, and K and V, which lie in the L2, are read once for 32 rows. The softmax is lean_tile-inl.hpp's, bit for bit,
// but that weights are left in bf16; the next rows' scores are computed between its rows, as a core multiplies tiles and computes
// vectors at a time.
//
// Order of arithmetic: as in amx_bf16.cpp.
#include "backends/cpu/amx_turned_tile.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <cstdint>

#include "backends/cpu/amx_registers-inl.hpp"
#include "softmax/state.hpp"

namespace lean::cpu {
namespace {

constexpr std::int32_t kRowsTogether = 2 * kTileRows;

/// K as second factors of 16 tokens, by blocks of 32 with zeros past the end: a block's tokens, and of these 32 dims after 32.
LEAN_TARGET_AMX inline void turn_keys(const TokenRows& k, PackedTile* out) {
  const std::int32_t chunks = k.dims / kPairLanes;
  for (std::int32_t token = 0; token < (k.tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens; token += kTileRows) {
    const auto key = [&](int r) { return token_row(k, token + r); };
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) pack_columns(key, std::min(kTileRows, k.tokens - token), chunk, *out++);
  }
}

LEAN_TARGET_AMX void begin_turned(const TokenRows& k, const TokenRows& v, void* turned_k, void* turned_v) noexcept {
  turn_keys(k, static_cast<PackedTile*>(turned_k));
  turn_values(v, static_cast<PackedTile*>(turned_v));
  const TileShapes shapes(kTileRows);
  _tile_loadconfig(&shapes);
}

LEAN_TARGET_AMX void end_turned() noexcept { _tile_release(); }

/// Registers 0 to 3 += rows [0, 16) and [16, 32) of the first factor, `row_bytes` apart, times the second factors `left` and `right`.
[[gnu::always_inline]] LEAN_TARGET_AMX inline void multiply_two_by_two(const std::uint16_t* rows, std::int64_t row_bytes,
                                                                       const PackedTile* left, const PackedTile* right,
                                                                       RowsAhead& ahead) {
  _tile_loadd(4, rows, row_bytes);
  _tile_loadd(6, left, 64);
  _tile_dpbf16ps(0, 4, 6);
  ahead.ask();
  _tile_loadd(7, right, 64);
  _tile_dpbf16ps(1, 4, 7);
  ahead.ask();
  _tile_loadd(5, rows + kTileRows * row_bytes / 2, row_bytes);
  _tile_dpbf16ps(2, 5, 6);
  ahead.ask();
  _tile_dpbf16ps(3, 5, 7);
  ahead.ask();
}

[[gnu::always_inline]] LEAN_TARGET_AMX inline void zero_two_by_two() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

[[gnu::always_inline]] LEAN_TARGET_AMX inline void store_two_by_two(float* out, std::int64_t stride) {
  _tile_stored(0, out, stride * 4);
  _tile_stored(1, out + kSumLanes, stride * 4);
  _tile_stored(2, out + kTileRows * stride, stride * 4);
  _tile_stored(3, out + kTileRows * stride + kSumLanes, stride * 4);
}

/// Scores of 32 rows with a turned K, a step at a time: 32 tokens and 32 dims.
class ScoreSteps {
 public:
  ScoreSteps(const QueryRows& q, const TokenRows& k, const RowBuffer& s, RowsAhead& ahead) noexcept
      : queries_(q.bf16),
        query_bytes_(std::int64_t{q.f32.stride} * 2),
        keys_(static_cast<const PackedTile*>(k.data)),
        out_(s.data),
        out_stride_(s.stride),
        chunks_(k.dims / kPairLanes),
        left_(s.rows > 0 ? (k.tokens + kBlockTokens - 1) / kBlockTokens * chunks_ : 0),
        ahead_(ahead) {}

  [[nodiscard]] std::int32_t left() const noexcept { return left_; }

  [[gnu::always_inline]] LEAN_TARGET_AMX void step() noexcept {
    if (chunk_ == 0) zero_two_by_two();
    multiply_two_by_two(queries_ + chunk_ * kPairLanes, query_bytes_, keys_ + chunk_, keys_ + chunks_ + chunk_, ahead_);
    --left_;
    if (++chunk_ < chunks_) return;
    store_two_by_two(out_, out_stride_);
    chunk_ = 0;
    out_ += kBlockTokens;
    keys_ += std::int64_t{2} * chunks_;
  }

 private:
  const std::uint16_t* queries_;
  std::int64_t query_bytes_;
  const PackedTile* keys_;
  float* out_;
  std::int64_t out_stride_;
  std::int32_t chunks_;
  std::int32_t left_;  // steps
  std::int32_t chunk_ = 0;
  RowsAhead& ahead_;
};

LEAN_TARGET_AMX void scores_of_turned(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch&) noexcept {
  RowsAhead none;
  for (ScoreSteps scores(q, k, s, none); scores.left() > 0;) scores.step();
}

/// 2^x for x <= 0, as in vectors-inl.hpp.
[[gnu::always_inline]] LEAN_TARGET_AMX inline __m512 exp2_nonpositive(__m512 x) {
  const __mmask16 weighs = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(weighs, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_maskz_sub_ps(weighs, x, whole);
  __m512 p = _mm512_set1_ps(0.00015353362F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00133988739F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00961843692F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0555033237F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240226477F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693147182F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  return _mm512_maskz_scalef_ps(weighs, p, whole);
}

LEAN_TARGET_AMX inline void scale_scores(float* s, std::int32_t padded, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (std::int32_t t = 0; t < padded; t += kSumLanes) _mm512_storeu_ps(s + t, _mm512_mul_ps(_mm512_loadu_ps(s + t), factor));
}

LEAN_TARGET_AMX inline float mask_and_max(float* s, std::int32_t padded, std::int32_t visible) {
  const __m512 none = _mm512_set1_ps(softmax::kNegInf);
  __m512 best = none;
  std::int32_t t = 0;
  for (; t + kSumLanes <= visible; t += kSumLanes) best = _mm512_max_ps(_mm512_loadu_ps(s + t), best);
  for (; t < padded; t += kSumLanes) {
    const std::int32_t seen = std::clamp(visible - t, 0, kSumLanes);
    const __m512 x = _mm512_mask_loadu_ps(none, static_cast<__mmask16>((1U << seen) - 1), s + t);
    _mm512_storeu_ps(s + t, x);
    best = _mm512_max_ps(x, best);
  }
  return _mm512_reduce_max_ps(best);
}

inline bool has_nan(const float* s, std::int32_t padded) {
  return std::any_of(s, s + padded, [](float x) { return x != x; });
}

/// Weights of a row in bf16, zeros up to whole blocks; their sum in fp32.
LEAN_TARGET_AMX inline float weigh(float* s, std::int32_t padded, float scale, float m) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 shift = _mm512_set1_ps(m);
  auto* rounded = reinterpret_cast<std::uint16_t*>(s);
  __m512 sum = _mm512_setzero_ps();
  for (std::int32_t t = 0; t < padded; t += kSumLanes) {
    const __m512 e = exp2_nonpositive(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(s + t), factor), shift));
    const __m256bh half = _mm512_cvtneps_pbh(e);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + t), reinterpret_cast<__m256i>(half));
    sum = _mm512_add_ps(sum, e);
  }
  if (padded % kBlockTokens != 0) _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + padded), _mm256_setzero_si256());
  return _mm512_reduce_add_ps(sum);
}

LEAN_TARGET_AMX void online_softmax_of_turned(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows,
                                              const NextScores& next) noexcept {
  constexpr std::int32_t kTogether = 8;  // rows whose largest scores are found before the first is weighed
  const std::int32_t padded = (tokens + kSumLanes - 1) / kSumLanes * kSumLanes;
  const bool keeps_order = rows.scale > 0.0F;
  const float scale = keeps_order ? rows.scale : 1.0F;
  RowsAhead none;
  RowsAhead& ahead = rows.ahead != nullptr ? *rows.ahead : none;
  ScoreSteps scores(next.q, next.k, next.s, ahead);
  ahead.share(kScoresEighths + kSoftmaxEighths, scores.left() > 0 ? 4 * scores.left() : s.rows);
  const std::int32_t steps = scores.left();
  for (std::int32_t first = 0; first < s.rows; first += kTogether) {
    const std::int32_t end = std::min(first + kTogether, s.rows);
    float tile_max[std::size_t{kTogether}];
    for (std::int32_t r = first; r < end; ++r) {
      if (next.s.rows == 0) ahead.ask();
      if (!keeps_order) scale_scores(s.row(r), padded, rows.scale);
      tile_max[r - first] = mask_and_max(s.row(r), padded, rows.visible[r]) * scale;
    }
    for (std::int32_t r = first; r < end; ++r) {
      while (steps - scores.left() < steps * (r + 1) / s.rows) scores.step();
      const float found = tile_max[r - first];
      const float m_old = rows.m[r];
      const float m_new = found > m_old || found != found ? found : m_old;
      if (m_new == softmax::kNegInf && !has_nan(s.row(r), padded)) {  // nothing seen yet: p = 0, and O and l stay what they are
        std::fill_n(s.row(r), padded, 0.0F);
        rows.rescale[r] = 1.0F;
        continue;
      }
      const float added = weigh(s.row(r), padded, scale, m_new);
      rows.rescale[r] = m_new == m_old ? 1.0F : softmax::rescale_factor(m_old, m_new);
      rows.l[r] = rows.l[r] * rows.rescale[r] + added;
      rows.m[r] = added == added ? m_new : added;
    }
  }
}

LEAN_TARGET_AMX void accumulate_turned(const RowBuffer& o, const RowBuffer& sums, const RowBuffer& p, const TokenRows& v,
                                       const float* rescale, const Prefetch& prefetch) noexcept {
  const std::int32_t chunks = v.dims / kPairLanes;
  const std::int32_t blocks = (v.tokens + kBlockTokens - 1) / kBlockTokens;
  const std::int64_t weight_bytes = std::int64_t{p.stride} * 4;
  RowsAhead none;
  RowsAhead& ahead = prefetch.ahead != nullptr ? *prefetch.ahead : none;
  ahead.share(kAccumulateEighths, 4 * blocks * chunks);
  const auto* weights = reinterpret_cast<const std::uint16_t*>(p.data);
  const auto* values = static_cast<const PackedTile*>(v.data);
  for (std::int32_t chunk = 0; chunk < chunks; ++chunk, values += 2) {
    zero_two_by_two();
    for (std::int32_t block = 0; block < blocks; ++block) {
      const PackedTile* pair = values + std::int64_t{2} * chunks * block;
      multiply_two_by_two(weights + block * kBlockTokens, weight_bytes, pair, pair + 1, ahead);
    }
    store_two_by_two(sums.data + chunk * kPairLanes, sums.stride);
  }
  add_sums(o, sums, rescale, v.dims);
}

/// Turning takes 32 turns of 16 x 16 words for a tile of 128 tokens of 128 dims, scores without it 12 for each 16 rows.
constexpr TurnedTile kTurnedTile{.from_rows = 40,
                                 .rows_together = kRowsTogether,
                                 .serves = [](std::int32_t dims) noexcept { return dims % kPairLanes == 0; },
                                 .begin = begin_turned,
                                 .scores = scores_of_turned,
                                 .online_softmax = online_softmax_of_turned,
                                 .accumulate = accumulate_turned,
                                 .end = end_turned};

}  // namespace

const TurnedTile& amx_turned_tile() noexcept { return kTurnedTile; }

}  // namespace lean::cpu

#endif

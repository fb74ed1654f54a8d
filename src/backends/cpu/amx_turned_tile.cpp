// A turned tile on AMX (TurnedTile, tile_kernels.hpp): K and V are laid out as second factors of tdpbf16ps once for all rows of a
// block, which then go through scores, softmax and accumulate 32 at a time. Products have two by two registers of sums: each factor
// that is loaded is multiplied twice, and K and V, which lie in the L2, are read once for 32 rows. The softmax is lean_tile-inl.hpp's,
// bit for bit, but that weights are left in bf16. Between its rows the products of other rows are computed, the values of those
// before and the scores of those behind, as a core multiplies registers and computes vectors at a time.
//
// Order of arithmetic: as in amx_bf16.cpp.
#include "backends/cpu/amx_turned_tile.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <cstdint>

#include "backends/cpu/amx_registers-inl.hpp"
#include "softmax/exp2_fit.hpp"
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

/// 32 rows of first factors times turned K or V, in steps: a step adds products 32 elements deep to two by two registers of sums,
/// and the last of some stores them.
class Products {
 public:
  Products() = default;

  /// With the first `tokens` of the tile.
  static Products scores(const TurnedCall& call, std::int32_t first_row, std::int32_t tokens, const RowBuffer& s) noexcept {
    const std::int32_t chunks = call.k.dims / kPairLanes;
    const std::int64_t stride = call.q.f32.stride;
    return {{call.q.bf16 + first_row * stride, stride * 2},
            {static_cast<const PackedTile*>(call.turned_k), chunks, 1, 2 * chunks},
            {s.data, s.stride},
            chunks,
            blocks_of(tokens)};
  }
  static Products sums(const TurnedCall& call, std::int32_t tokens, const RowBuffer& p) noexcept {
    const std::int32_t chunks = call.v.dims / kPairLanes;
    return {{reinterpret_cast<const std::uint16_t*>(p.data), std::int64_t{p.stride} * 4},
            {static_cast<const PackedTile*>(call.turned_v), 1, 2 * chunks, 2},
            {call.sums.data, call.sums.stride},
            blocks_of(tokens),
            chunks};
  }

  [[nodiscard]] std::int32_t left() const noexcept { return left_; }

  [[gnu::always_inline]] LEAN_TARGET_AMX void step(RowsAhead& ahead) noexcept {
    if (at_ == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const std::uint16_t* row = first_.rows + at_ * kPairLanes;
    const PackedTile* factor = second_.left + at_ * second_.deeper;
    _tile_loadd(4, row, first_.row_bytes);
    _tile_loadd(6, factor, 64);
    _tile_dpbf16ps(0, 4, 6);
    ahead.ask();
    _tile_loadd(7, factor + second_.right, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, row + kTileRows * first_.row_bytes / 2, first_.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    --left_;
    if (++at_ < depth_) return;
    const std::int64_t out_bytes = out_.stride * 4;
    _tile_stored(0, out_.row, out_bytes);
    _tile_stored(1, out_.row + kSumLanes, out_bytes);
    _tile_stored(2, out_.row + kTileRows * out_.stride, out_bytes);
    _tile_stored(3, out_.row + kTileRows * out_.stride + kSumLanes, out_bytes);
    at_ = 0;
    second_.left += second_.beside;
    out_.row += 2 * kSumLanes;
  }

  LEAN_TARGET_AMX void finish(RowsAhead& ahead) noexcept {
    while (left_ > 0) step(ahead);
  }

 private:
  struct First {
    const std::uint16_t* rows = nullptr;
    std::int64_t row_bytes = 0;
  };
  struct Second {  // distances in tiles
    const PackedTile* left = nullptr;
    std::int64_t right = 0;   // the tile beside it
    std::int64_t deeper = 0;  // the next step's
    std::int64_t beside = 0;  // that of the next sums
  };
  struct Out {
    float* row = nullptr;
    std::int64_t stride = 0;
  };

  Products(const First& first, const Second& second, const Out& out, std::int32_t depth, std::int32_t count) noexcept
      : first_(first), second_(second), out_(out), depth_(depth), left_(depth * count) {}

  static std::int32_t blocks_of(std::int32_t tokens) noexcept { return (tokens + kBlockTokens - 1) / kBlockTokens; }

  First first_;
  Second second_;
  Out out_;
  std::int32_t depth_ = 0;  // steps to one another's sums
  std::int32_t left_ = 0;   // steps
  std::int32_t at_ = 0;
};

/// 2^x for x <= 0, as in vectors-inl.hpp.
[[gnu::always_inline]] LEAN_TARGET_AMX inline __m512 exp2_nonpositive(__m512 x) {
  const __mmask16 weighs = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(weighs, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_maskz_sub_ps(weighs, x, whole);
  __m512 p = _mm512_set1_ps(softmax::kExp2Fit[0]);
  LEAN_UNROLL for (int i = 1; i < 7; ++i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(softmax::kExp2Fit[i]));
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

/// The products of `before` and then of `behind` are computed meanwhile.
LEAN_TARGET_AMX void online_softmax(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows, Products& before,
                                    Products& behind, RowsAhead& ahead) {
  constexpr std::int32_t kTogether = 8;  // rows whose largest scores are found before the first is weighed
  const std::int32_t padded = (tokens + kSumLanes - 1) / kSumLanes * kSumLanes;
  const bool keeps_order = rows.scale > 0.0F;
  const float scale = keeps_order ? rows.scale : 1.0F;
  const std::int32_t steps = before.left() + behind.left();
  for (std::int32_t first = 0; first < s.rows; first += kTogether) {
    const std::int32_t end = std::min(first + kTogether, s.rows);
    float tile_max[std::size_t{kTogether}];
    for (std::int32_t r = first; r < end; ++r) {
      if (!keeps_order) scale_scores(s.row(r), padded, rows.scale);
      tile_max[r - first] = mask_and_max(s.row(r), padded, rows.visible[r]) * scale;
    }
    for (std::int32_t r = first; r < end; ++r) {
      while (steps - before.left() - behind.left() < steps * (r + 1) / s.rows) (before.left() > 0 ? before : behind).step(ahead);
      const float m_new = rows.larger(r, tile_max[r - first]);
      if (m_new == softmax::kNegInf && !has_nan(s.row(r), padded)) {
        std::fill_n(s.row(r), padded, 0.0F);
        rows.take_nothing(r);
      } else {
        rows.take(r, m_new, weigh(s.row(r), padded, scale, m_new));
      }
    }
  }
}

/// Rows of a block that go through the stages together, from `first` on, and those of the tile's tokens that they see; no rows behind
/// the last that see any. Scores of three are in use at a time and have places in turn, of all rows where rules mask.
class Run {
 public:
  Run(const TurnedCall& call, std::int32_t first, std::int32_t place) noexcept : call_(&call), first_(first), place_(place) {
    for (; first_ < call.s.rows; first_ += kRowsTogether) {
      rows_ = std::min(kRowsTogether, call.s.rows - first_);
      tokens_ = call.tokens_of(first_, rows_);
      if (tokens_ > 0) return;
    }
    rows_ = 0;
  }

  [[nodiscard]] bool is_none() const noexcept { return rows_ == 0; }
  [[nodiscard]] Run next() const noexcept { return {*call_, first_ + kRowsTogether, (place_ + 1) % 3}; }
  [[nodiscard]] std::int32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] RowBuffer s() const noexcept {
    return {call_->s.row(call_->masks ? first_ : place_ * kRowsTogether), rows_, call_->s.stride};
  }
  [[nodiscard]] Products scores() const noexcept { return Products::scores(*call_, first_, tokens_, s()); }
  [[nodiscard]] Products sums() const noexcept { return Products::sums(*call_, tokens_, s()); }
  [[nodiscard]] bool rule() const noexcept { return call_->rule(first_, s()); }
  [[nodiscard]] SoftmaxRows softmax(bool is_scaled) const noexcept { return call_->softmax_of(first_, is_scaled); }
  void add() const noexcept {
    add_sums({call_->o.row(first_), rows_, call_->o.stride}, call_->sums, call_->softmax.rescale + first_, call_->v.dims);
  }

 private:
  const TurnedCall* call_;
  std::int32_t first_;
  std::int32_t place_;
  std::int32_t rows_ = 0;
  std::int32_t tokens_ = 0;
};

std::int32_t steps_of(const TurnedCall& call) noexcept {
  std::int32_t steps = 0;
  for (Run run(call, 0, 0); !run.is_none(); run = run.next()) steps += run.scores().left() + run.sums().left();
  return steps;
}

LEAN_TARGET_AMX void compute(const TurnedCall& call) noexcept {
  turn_keys(call.k, static_cast<PackedTile*>(call.turned_k));
  if (!call.masks) turn_values(call.v, static_cast<PackedTile*>(call.turned_v));
  RowsAhead none;
  RowsAhead& ahead = call.with_scores.ahead != nullptr ? *call.with_scores.ahead : none;
  ahead.share(8, steps_of(call));
  Tiles tiles;
  tiles.shape(kTileRows);
  const Run first(call, 0, 0);
  bool is_scaled = false;
  if (call.masks) {
    for (Run run = first; !run.is_none(); run = run.next()) run.scores().finish(ahead);
    is_scaled = call.rule(0, call.s);
    turn_values(call.v, static_cast<PackedTile*>(call.turned_v));
  } else if (!first.is_none()) {
    first.scores().finish(ahead);
  }
  Products before;
  for (Run run = first, last = first; !run.is_none(); last = run, run = run.next()) {
    const Run next = run.next();
    Products behind = next.is_none() || call.masks ? Products() : next.scores();
    if (!call.masks) is_scaled = run.rule();
    const bool is_first = before.left() == 0;
    online_softmax(run.s(), run.tokens(), run.softmax(is_scaled), before, behind, ahead);
    if (!is_first) last.add();
    before = run.sums();
    if (!next.is_none()) continue;
    before.finish(ahead);
    run.add();
  }
}

/// Turning takes 32 turns of 16 x 16 words for a tile of 128 tokens of 128 dims, scores without it 12 for each 16 rows.
constexpr TurnedTile kTurnedTile{.from_rows = 40,
                                 .keeps_order = true,
                                 .serves = [](std::int32_t dims) noexcept { return dims % kPairLanes == 0; },
                                 .compute = compute};

}  // namespace

const TurnedTile& amx_turned_tile() noexcept { return kTurnedTile; }

}  // namespace lean::cpu

#endif

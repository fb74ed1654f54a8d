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

  static Products scores(const QueryRows& q, const TokenRows& k, const PackedTile* turned_k, float* s,
                         std::int32_t stride) noexcept {
    const std::int32_t chunks = k.dims / kPairLanes;
    return {{q.bf16, std::int64_t{q.f32.stride} * 2}, {turned_k, chunks, 1, 2 * chunks}, {s, stride}, chunks, blocks_of(k.tokens)};
  }
  static Products sums(const float* p, std::int32_t stride, const TokenRows& v, const PackedTile* turned_v,
                       const RowBuffer& sums) noexcept {
    const std::int32_t chunks = v.dims / kPairLanes;
    const auto* weights = reinterpret_cast<const std::uint16_t*>(p);
    return {
        {weights, std::int64_t{stride} * 4}, {turned_v, 1, 2 * chunks, 2}, {sums.data, sums.stride}, blocks_of(v.tokens), chunks};
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
    ahead.ask();
    _tile_loadd(5, row + kTileRows * first_.row_bytes / 2, first_.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    ahead.ask();
    _tile_dpbf16ps(3, 5, 7);
    ahead.ask();
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

/// What belongs to the rows that a block's row `first` begins. Scores of three such runs of rows are in use at a time.
class Run {
 public:
  Run(const TurnedCall& call, std::int32_t first) noexcept
      : call_(call), first_(first), rows_(std::min(kRowsTogether, call.s.rows - first)) {}

  [[nodiscard]] RowBuffer s() const noexcept { return {call_.s.row(first_ % (3 * kRowsTogether)), rows_, call_.s.stride}; }
  [[nodiscard]] Products scores() const noexcept {
    QueryRows q = call_.q;
    q.bf16 += std::int64_t{first_} * q.f32.stride;
    return Products::scores(q, call_.k, static_cast<const PackedTile*>(call_.turned_k), s().data, call_.s.stride);
  }
  [[nodiscard]] SoftmaxRows softmax() const noexcept {
    const SoftmaxRows& all = call_.softmax;
    const bool scaled = call_.apply_rules != nullptr && call_.apply_rules(call_.context, first_, s());
    return {scaled ? 1.0F : all.scale, all.visible + first_, all.m + first_, all.l + first_, all.rescale + first_};
  }
  [[nodiscard]] Products sums() const noexcept {
    return Products::sums(s().data, call_.s.stride, call_.v, static_cast<const PackedTile*>(call_.turned_v), call_.sums);
  }
  void add() const noexcept {
    add_sums({call_.o.row(first_), rows_, call_.o.stride}, call_.sums, call_.softmax.rescale + first_, call_.v.dims);
  }

 private:
  const TurnedCall& call_;
  std::int32_t first_;
  std::int32_t rows_;
};

LEAN_TARGET_AMX void compute(const TurnedCall& call) noexcept {
  turn_keys(call.k, static_cast<PackedTile*>(call.turned_k));
  turn_values(call.v, static_cast<PackedTile*>(call.turned_v));
  RowsAhead none;
  RowsAhead& ahead = call.ahead != nullptr ? *call.ahead : none;
  Tiles tiles;
  tiles.shape(kTileRows);
  Products behind = Run(call, 0).scores();
  const std::int32_t runs = (call.s.rows + kRowsTogether - 1) / kRowsTogether;
  ahead.share(8, 4 * runs * (behind.left() + Run(call, 0).sums().left()));
  behind.finish(ahead);
  Products before;
  for (std::int32_t first = 0; first < call.s.rows; first += kRowsTogether) {
    const Run run(call, first);
    const bool last = first + kRowsTogether >= call.s.rows;
    behind = last ? Products() : Run(call, first + kRowsTogether).scores();
    online_softmax(run.s(), call.k.tokens, run.softmax(), before, behind, ahead);
    if (first > 0) Run(call, first - kRowsTogether).add();
    before = run.sums();
    if (last) {
      before.finish(ahead);
      run.add();
    }
  }
}

/// Turning takes 32 turns of 16 x 16 words for a tile of 128 tokens of 128 dims, scores without it 12 for each 16 rows.
constexpr TurnedTile kTurnedTile{
    .from_rows = 40, .serves = [](std::int32_t dims) noexcept { return dims % kPairLanes == 0; }, .compute = compute};

}  // namespace

const TurnedTile& amx_turned_tile() noexcept { return kTurnedTile; }

}  // namespace lean::cpu

#endif

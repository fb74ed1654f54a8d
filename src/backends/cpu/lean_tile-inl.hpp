// LeanTile on a CPU, written once for all instruction sets: LeanAttention, Alg. 1, lines 14-26.
// Included by highway_targets.cpp once per target and by scalar_target.cpp; not a header that compiles alone.
//
// Register plan: scores keep kRows x kTokens sums in registers and reduce them four at a time; accumulate keeps
// kRows x kVectors of O in registers while it walks the tile's tokens. K and V are converted to fp32 as they are loaded; two
// vectors of bf16 at a time, even elements by a shift and odd ones by a mask, which is half the work of widening them.

#include "backends/cpu/vectors-inl.hpp"
//
#include "backends/cpu/element_types-inl.hpp"
#include "backends/cpu/score_rules-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {  // the scalar target is compiled in two files

template <typename T>
const StorageOf<T>* spaced_row(const TokenRows& rows, std::int32_t token) {
  return reinterpret_cast<const StorageOf<T>*>(static_cast<const std::byte*>(rows.data) + token * rows.token_stride_bytes);
}

template <typename T>
const StorageOf<T>* token_row(const TokenRows& rows, std::int32_t token) {
  return reinterpret_cast<const StorageOf<T>*>(rows.row(token));
}

// ---- scores ---------------------------------------------------------------------------------------------------------

/// Lane sums of four accumulators, stored side by side; the same tree for each of the four.
HWY_INLINE void store_lane_sums(const Vec* acc, float* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) out[i] = hn::GetLane(acc[i]);
#else
  const F32 f32;
  const hn::RebindToUnsigned<hn::Repartition<double, F32>> u64;
  const Vec ab = hn::Add(hn::InterleaveLower(f32, acc[0], acc[1]), hn::InterleaveUpper(f32, acc[0], acc[1]));
  const Vec cd = hn::Add(hn::InterleaveLower(f32, acc[2], acc[3]), hn::InterleaveUpper(f32, acc[2], acc[3]));
  const auto ab64 = hn::BitCast(u64, ab);
  const auto cd64 = hn::BitCast(u64, cd);
  Vec sums =
      hn::Add(hn::BitCast(f32, hn::InterleaveLower(u64, ab64, cd64)), hn::BitCast(f32, hn::InterleaveUpper(u64, ab64, cd64)));
  // Each 128-bit block now holds (a, b, c, d) over its own lanes: add the blocks.
#if HWY_MAX_BYTES >= 32
  const hn::Half<F32> half;
  const auto sums_256 = [&] {
#if HWY_MAX_BYTES >= 64
    return hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums));
#else
    return sums;
#endif
  }();
  const hn::Full128<float> f128;
  const hn::DFromV<decltype(sums_256)> f256;
  hn::StoreU(hn::Add(hn::LowerHalf(f128, sums_256), hn::UpperHalf(f128, sums_256)), f128, out);
  (void)half;
  (void)f256;
#else
  hn::StoreU(sums, f32, out);
#endif
#endif
}

/// Scores of kRows rows with kTokens tokens; tokens past the end repeat the last one and are masked later. Rows of s
/// are written in groups of four: what a group writes past kTokens is overwritten by the next block or never read.
template <typename T, int kRows, int kTokens>
HWY_INLINE void scores_block(const QueryRows& q, std::int32_t row, const TokenRows& k, std::int32_t token, const RowBuffer& s) {
  const F32 f32;
  const StorageOf<T>* keys[std::size_t{kTokens}];
  for (int t = 0; t < kTokens; ++t) keys[t] = token_row<T>(k, token + t < k.tokens ? token + t : k.tokens - 1);
  const float* queries = q.f32.row(row);
  Vec acc[std::size_t{kRows * kTokens}];
  for (Vec& a : acc) a = hn::Zero(f32);
  const auto step = [&](std::int32_t d, const auto& load) HWY_ATTR {
    Vec key[std::size_t{kTokens}];
    for (int t = 0; t < kTokens; ++t) key[t] = load(keys[t] + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec query = hn::Load(f32, queries + r * q.f32.stride + d);
      for (int t = 0; t < kTokens; ++t) acc[r * kTokens + t] = hn::MulAdd(query, key[t], acc[r * kTokens + t]);
    }
  };
  std::int32_t d = 0;
  if constexpr (Element<T>::kPairs) {  // queries lie in the same order: order_query()
    for (; d + 2 * kLanes <= k.dims; d += 2 * kLanes) {
      step(d, [](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load_even(p); });
      step(d + kLanes, [](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load_odd(p - kLanes); });
    }
  }
  for (; d + kLanes <= k.dims; d += kLanes) step(d, [](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load(p); });
  if (d < k.dims) step(d, [&](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load_first(p, k.dims - d); });
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; t += 4) {
      Vec four[4];
      for (int i = 0; i < 4; ++i) four[i] = t + i < kTokens ? acc[r * kTokens + t + i] : hn::Zero(f32);
      store_lane_sums(four, s.row(row + r) + token + t);
    }
  }
}

/// Puts a query row in the order in which scores<T> reads keys: pairs of vectors become even elements, then odd ones.
template <typename T>
void order_query(float* row, std::int32_t dims) noexcept {
  if constexpr (Element<T>::kPairs) {
    for (std::int32_t d = 0; d + 2 * kLanes <= dims; d += 2 * kLanes) {
      Vec even;
      Vec odd;
      hn::LoadInterleaved2(F32(), row + d, even, odd);
      hn::StoreU(even, F32(), row + d);
      hn::StoreU(odd, F32(), row + d + kLanes);
    }
  }
  (void)row;
  (void)dims;
}

template <typename T, int kRows, int kTokens>
HWY_INLINE void scores_rows(const QueryRows& q, std::int32_t row, const TokenRows& k, const RowBuffer& s, PrefetchStream& next) {
  for (std::int32_t token = 0; token < k.tokens; token += kTokens) {
    next.step();
    scores_block<T, kRows, kTokens>(q, row, k, token, s);
  }
}

template <typename T>
void scores(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& rows) noexcept {
  constexpr int kWide = kManyRegisters ? 4 : 3;
  PrefetchStream next(rows, score_steps(s.rows, k.tokens, kWide));
  std::int32_t row = 0;
  for (; kManyRegisters && row + 8 <= s.rows; row += 8) scores_rows<T, 8, 3>(q, row, k, s, next);
  for (; row + 4 <= s.rows; row += 4) scores_rows<T, 4, kWide>(q, row, k, s, next);
  for (; row + 2 <= s.rows; row += 2) scores_rows<T, 2, 4>(q, row, k, s, next);
  if (row < s.rows) scores_rows<T, 1, 8>(q, row, k, s, next);
}

// ---- online softmax -------------------------------------------------------------------------------------------------

/// Largest scaled score a row sees; the lanes past `visible` become -inf. Returns NaN if any seen score is NaN.
HWY_INLINE float mask_and_max(float* s, std::int32_t padded, std::int32_t visible, float scale) {
  const F32 f32;
  const I32 i32;
  const Vec factor = hn::Set(f32, scale);
  const Vec none = hn::Set(f32, softmax::kNegInf);
  Vec best = none;
  Vec nan_seen = hn::Zero(f32);
  for (std::int32_t t = 0; t < padded; t += kLanes) {
    Vec x = hn::Mul(hn::Load(f32, s + t), factor);
    if (t + kLanes > visible) {
      const auto seen = hn::Lt(hn::Iota(i32, t), hn::Set(i32, visible));
      x = hn::IfThenElse(hn::RebindMask(f32, seen), x, none);
    }
    hn::Store(x, f32, s + t);
    best = hn::Max(best, x);
    nan_seen = hn::Add(nan_seen, hn::IfThenElseZero(hn::IsNaN(x), x));
  }
  return hn::GetLane(hn::Add(hn::MaxOfLanes(f32, best), hn::SumOfLanes(f32, nan_seen)));
}

void online_softmax(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows) noexcept {
  const F32 f32;
  const std::int32_t padded = (tokens + kLanes - 1) / kLanes * kLanes;
  for (std::int32_t r = 0; r < s.rows; ++r) {
    float* p = s.row(r);
    const float tile_max = mask_and_max(p, padded, rows.visible[r], rows.scale);
    const float m_old = rows.m[r];
    const float m_new = tile_max > m_old || tile_max != tile_max ? tile_max : m_old;
    if (m_new == softmax::kNegInf) {  // nothing seen yet: p = 0, and O and l stay what they are
      for (std::int32_t t = 0; t < padded; t += kLanes) hn::Store(hn::Zero(f32), f32, p + t);
      rows.rescale[r] = 1.0F;
      continue;
    }
    const Vec shift = hn::Set(f32, m_new);
    Vec sum = hn::Zero(f32);
    for (std::int32_t t = 0; t < padded; t += kLanes) {
      const Vec e = exp2_nonpositive(hn::Sub(hn::Load(f32, p + t), shift));
      hn::Store(e, f32, p + t);
      sum = hn::Add(sum, e);
    }
    rows.rescale[r] = m_new == m_old ? 1.0F : softmax::rescale_factor(m_old, m_new);
    rows.l[r] = rows.l[r] * rows.rescale[r] + hn::GetLane(hn::SumOfLanes(f32, sum));
    rows.m[r] = m_new;
  }
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

/// kVectors vectors of a row of O, scaled; in pairs: even elements, then odd ones.
template <bool kInPairs, int kVectors>
HWY_INLINE void load_values(const float* row, Vec factor, Vec* acc) {
  for (int i = 0; i < kVectors; i += kInPairs ? 2 : 1) {
    if constexpr (kInPairs) {
      hn::LoadInterleaved2(F32(), row + i * kLanes, acc[i], acc[i + 1]);
      acc[i + 1] = hn::Mul(acc[i + 1], factor);
    } else {
      acc[i] = hn::Load(F32(), row + i * kLanes);
    }
    acc[i] = hn::Mul(acc[i], factor);
  }
}

template <bool kInPairs, int kVectors>
HWY_INLINE void store_values(const Vec* acc, float* row) {
  for (int i = 0; i < kVectors; i += kInPairs ? 2 : 1) {
    if constexpr (kInPairs) {
      hn::StoreInterleaved2(acc[i], acc[i + 1], F32(), row + i * kLanes);
    } else {
      hn::Store(acc[i], F32(), row + i * kLanes);
    }
  }
}

/// O of kRows rows and kVectors vectors from dim `d` on, held in registers over all tokens of the tile.
template <typename T, int kRows, int kVectors>
HWY_INLINE void accumulate_block(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const TokenRows& v, const float* rescale,
                                 std::int32_t d, PrefetchStream& next) {
  const F32 f32;
  // Pairs of vectors save conversions only where few rows share them.
  constexpr bool kInPairs = Element<T>::kPairs && kVectors % 2 == 0 && kRows <= 2;
  float* out = o.row(row) + d;
  Vec acc[std::size_t{kRows * kVectors}];
  for (int r = 0; r < kRows; ++r) {
    load_values<kInPairs, kVectors>(out + r * o.stride, hn::Set(f32, rescale[row + r]), acc + r * kVectors);
  }
  const float* weights = p.row(row);
  const bool whole = kVectors > 1 || d + kLanes <= v.dims;  // only the last single vector may be cut short
  const auto add_token = [&](std::int32_t t, const StorageOf<T>* values) HWY_ATTR __attribute__((always_inline)) {
    next.step();
    Vec value[std::size_t{kVectors}];
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kInPairs) {
        const StorageOf<T>* pair = values + i / 2 * 2 * kLanes;
        value[i] = i % 2 == 0 ? Element<T>::load_even(pair) : Element<T>::load_odd(pair);
      } else {
        value[i] = whole ? Element<T>::load(values + i * kLanes) : Element<T>::load_first(values, v.dims - d);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(f32, weights[r * p.stride + t]);
      for (int i = 0; i < kVectors; ++i) acc[r * kVectors + i] = hn::MulAdd(weight, value[i], acc[r * kVectors + i]);
    }
  };
  if (v.table == nullptr) {  // two loops: the test inside one costs 10 % (Zen 3, four rows, in cache)
    for (std::int32_t t = 0; t < v.tokens; ++t) add_token(t, spaced_row<T>(v, t) + d);
  } else {
    for (std::int32_t t = 0; t < v.tokens; ++t) add_token(t, token_row<T>(v, t) + d);
  }
  for (int r = 0; r < kRows; ++r) store_values<kInPairs, kVectors>(acc + r * kVectors, out + r * o.stride);
}

template <typename T, int kRows, int kVectors>
HWY_INLINE void accumulate_rows(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const TokenRows& v, const float* rescale,
                                PrefetchStream& next) {
  std::int32_t d = 0;
  for (; d + kVectors * kLanes <= v.dims; d += kVectors * kLanes) {
    if (kVectors == 3 && d + 4 * kLanes == v.dims) break;  // four left: two and two, not three and one
    accumulate_block<T, kRows, kVectors>(o, p, row, v, rescale, d, next);
  }
  for (; kVectors > 2 && d + 2 * kLanes <= v.dims; d += 2 * kLanes) accumulate_block<T, kRows, 2>(o, p, row, v, rescale, d, next);
  for (; d < v.dims; d += kLanes) accumulate_block<T, kRows, 1>(o, p, row, v, rescale, d, next);
}

template <typename T>
void accumulate(const RowBuffer& o, const RowBuffer& p, const TokenRows& v, const float* rescale, const Prefetch& rows) noexcept {
  constexpr int kWide = kManyRegisters ? 4 : 3;
  PrefetchStream next(rows, accumulate_steps(o.rows, v, kWide * kLanes));
  std::int32_t row = 0;
  for (; kManyRegisters && row + 8 <= o.rows; row += 8) accumulate_rows<T, 8, 2>(o, p, row, v, rescale, next);
  for (; row + 4 <= o.rows; row += 4) accumulate_rows<T, 4, kWide>(o, p, row, v, rescale, next);
  for (; row + 2 <= o.rows; row += 2) accumulate_rows<T, 2, 4>(o, p, row, v, rescale, next);
  if (row < o.rows) accumulate_rows<T, 1, 8>(o, p, row, v, rescale, next);
}

// ---- rows in and out, merge -----------------------------------------------------------------------------------------

template <typename T>
void load_row(const void* in, float* out, std::int32_t dims) noexcept {
  const auto* values = static_cast<const StorageOf<T>*>(in);
  std::int32_t d = 0;
  for (; d + kLanes <= dims; d += kLanes) hn::StoreU(Element<T>::load(values + d), F32(), out + d);
  for (; d < dims; ++d) out[d] = Element<T>::get(values[d]);
}

template <typename T>
void store_row(const float* in, float scale, void* out, std::int32_t dims) noexcept {
  auto* values = static_cast<StorageOf<T>*>(out);
  if (scale == 0.0F) {  // a row without weight is 0 even where O holds NaN
    for (std::int32_t d = 0; d < dims; ++d) values[d] = Element<T>::put(0.0F);
    return;
  }
  std::int32_t d = 0;
  if constexpr (Element<T>::kStoresVectors) {
    const Vec factor = hn::Set(F32(), scale);
    for (; d + kLanes <= dims; d += kLanes) Element<T>::store(hn::Mul(hn::LoadU(F32(), in + d), factor), values + d);
  }
  for (; d < dims; ++d) values[d] = Element<T>::put(in[d] * scale);
}

void merge_row(const softmax::MergeStep& step, float* into, const float* other, std::int32_t dims) noexcept {
  const F32 f32;
  const Vec factor = hn::Set(f32, step.factor);
  for (std::int32_t d = 0; d < dims; d += kLanes) {  // rows are padded to whole vectors
    const Vec a = hn::LoadU(f32, into + d);
    const Vec b = hn::LoadU(f32, other + d);
    hn::StoreU(step.first_is_big ? hn::MulAdd(b, factor, a) : hn::MulAdd(a, factor, b), f32, into + d);
  }
}

[[maybe_unused]] TileKernels tile_kernels() noexcept {
  return {
      .name = hwy::TargetName(HWY_TARGET),
      .order_query = {order_query<float>, order_query<Half>, order_query<BFloat16>, order_query<Float8E4M3>,
                      order_query<Float8E5M2>},
      .scores = {scores<float>, scores<Half>, scores<BFloat16>, scores<Float8E4M3>, scores<Float8E5M2>},
      .apply_rule = apply_rule,
      .online_softmax = online_softmax,
      .accumulate = {accumulate<float>, accumulate<Half>, accumulate<BFloat16>, accumulate<Float8E4M3>, accumulate<Float8E5M2>},
      .load_row = {load_row<float>, load_row<Half>, load_row<BFloat16>, load_row<Float8E4M3>, load_row<Float8E5M2>},
      .store_row = {store_row<float>, store_row<Half>, store_row<BFloat16>},
      .merge_row = merge_row,
  };
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

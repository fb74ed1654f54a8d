// LeanTile on a CPU, written once for all instruction sets: LeanAttention, Alg. 1, lines 14-26. Included by highway_targets.cpp
// once per target and by scalar_target.cpp; not a header that compiles alone.
//
// K and V are read once, in the order of memory: a few tokens meet all rows before the next ones are read, and where there is one row
// a token is read after the other. Register plan: scores
// keep kRows x kTokens sums and reduce them four at a time; accumulate keeps kRows x kTokens weights and adds that many tokens to
// each vector of the tile's sum it loads. K and V are converted to fp32 as they are loaded; two vectors of bf16 at a time, even
// elements by a shift and odd ones by a mask, which is half the work of widening them.

#include "backends/cpu/unroll.hpp"
#include "backends/cpu/vectors-inl.hpp"
//
#include "backends/cpu/element_types-inl.hpp"
#include "backends/cpu/many_rows-inl.hpp"
#include "backends/cpu/score_rules-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {  // the scalar target is compiled in two files

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

/// Elements of T in a cache line, or in a vector (a pair of vectors where they come in pairs) if that is more.
template <typename T>
constexpr std::int32_t kElementsPerLine =
    std::max(kLineBytes / static_cast<std::int32_t>(sizeof(StorageOf<T>)), (Element<T>::kPairs ? 2 : 1) * kLanes);

/// The line that holds dims [d, d + kElementsPerLine) of a row. Loops over one query row have few instructions a line in AVX-512.
template <typename T, int kRows>
HWY_INLINE void ask_line(const std::byte* row, std::int32_t d) {
  const std::byte* line = row + static_cast<std::size_t>(d) * sizeof(StorageOf<T>);
  kRows == 1 && kManyRegisters ? ask_into_l1(line) : ask_for(line);
}

/// Those of kTokens rows, which meet kRows query rows.
template <typename T, int kRows, int kTokens>
HWY_INLINE void ask_lines(const std::byte* const* rows, std::int32_t d) {
  LEAN_UNROLL for (int t = 0; t < kTokens; ++t) ask_line<T, kRows>(rows[t], d);
}

/// Lane sums of the products of kRows rows with kTokens keys, [row][token]; beside a line of each key, that of the row to ask for is
/// asked for.
template <typename T, int kRows, int kTokens>
HWY_INLINE void lane_sums(const float* queries, std::int32_t stride, const StorageOf<T>* const* keys, const std::byte* const* later,
                          std::int32_t dims, Vec* acc) {
  const F32 f32;
  LEAN_UNROLL for (int i = 0; i < kRows * kTokens; ++i) acc[i] = hn::Zero(f32);
  const auto step = [&](std::int32_t d, const auto& load) HWY_ATTR {
    Vec key[std::size_t{kTokens}];
    LEAN_UNROLL for (int t = 0; t < kTokens; ++t) key[t] = load(keys[t] + d);
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec query = hn::Load(f32, queries + r * stride + d);
      LEAN_UNROLL for (int t = 0; t < kTokens; ++t) acc[r * kTokens + t] = hn::MulAdd(query, key[t], acc[r * kTokens + t]);
    }
  };
  const auto step_pair = [&](std::int32_t d) HWY_ATTR {  // queries lie in the same order: order_query()
    step(d, [](const StorageOf<T>* p) HWY_ATTR { return load_of_pair<T, 0>(p); });
    step(d + kLanes, [](const StorageOf<T>* p) HWY_ATTR { return load_of_pair<T, 1>(p - kLanes); });
  };
  constexpr std::int32_t kPairLanes = 2 * kLanes;
  std::int32_t d = 0;
  for (; d + kElementsPerLine<T> <= dims; d += kElementsPerLine<T>) {
    ask_lines<T, kRows, kTokens>(later, d);
    if constexpr (kElementsPerLine<T> == kLanes) {
      step(d, [](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load(p); });
    } else {
      LEAN_UNROLL for (std::int32_t i = 0; i < kElementsPerLine<T>; i += kPairLanes) step_pair(d + i);
    }
  }
  if (d < dims) ask_lines<T, kRows, kTokens>(later, d);
  for (; Element<T>::kPairs && d + kPairLanes <= dims; d += kPairLanes) step_pair(d);
  for (; d + kLanes <= dims; d += kLanes) step(d, [](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load(p); });
  if (d < dims) step(d, [&](const StorageOf<T>* p) HWY_ATTR { return Element<T>::load_first(p, dims - d); });
}

/// Scores of kRows rows with kTokens tokens; tokens past the end repeat the last one and are masked later. Rows of s
/// are written in groups of four: what a group writes past kTokens is overwritten by the next block or never read.
template <typename T, int kRows, int kTokens>
HWY_INLINE void scores_block(const QueryRows& q, std::int32_t row, const TokenRows& k, std::int32_t token, const RowBuffer& s,
                             const ReadAhead& ahead) {
  const F32 f32;
  const StorageOf<T>* keys[std::size_t{kTokens}];
  const std::byte* later[std::size_t{kTokens}];
  if (kRows == 1 && token + kTokens <= k.tokens) {
    const std::byte* rows[std::size_t{kTokens}];
    k.find<kTokens>(token, rows);
    LEAN_UNROLL for (int t = 0; t < kTokens; ++t) keys[t] = reinterpret_cast<const StorageOf<T>*>(rows[t]);
    row == 0 ? ahead.find<kTokens>(token, later) : k.find<kTokens>(token, later);  // once for each token
  } else {
    LEAN_UNROLL for (int t = 0; t < kTokens; ++t) {
      const std::int32_t own = token + t < k.tokens ? token + t : k.tokens - 1;
      keys[t] = token_row<T>(k, own);
      later[t] = row == 0 ? ahead.row(own) : k.row(own);
    }
  }
  const float* queries = q.f32.row(row);
  Vec acc[std::size_t{kRows * kTokens}];
  if constexpr (kRows == 1) {  // a key is not read for others: memory is read in its order, which hardware prefetchers follow
    LEAN_UNROLL for (int t = 0; t < kTokens; ++t) {
      lane_sums<T, 1, 1>(queries, q.f32.stride, keys + t, later + t, k.dims, acc + t);
    }
  } else {
    lane_sums<T, kRows, kTokens>(queries, q.f32.stride, keys, later, k.dims, acc);
  }
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    LEAN_UNROLL for (int t = 0; t < kTokens; t += 4) {
      Vec four[4];
      LEAN_UNROLL for (int i = 0; i < 4; ++i) four[i] = t + i < kTokens ? acc[r * kTokens + t + i] : hn::Zero(f32);
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

/// Tokens that meet all rows before the next ones are read: whole blocks of three and of four.
constexpr std::int32_t kScoreTokens = 12;

template <typename T, int kRows, int kTokens>
HWY_INLINE void scores_rows(const QueryRows& q, std::int32_t row, const TokenRows& k, std::int32_t token, const RowBuffer& s,
                            const ReadAhead& ahead) {
  const std::int32_t end = std::min(token + kScoreTokens, k.tokens);
  for (; token < end; token += kTokens) scores_block<T, kRows, kTokens>(q, row, k, token, s, ahead);
}

template <typename T>
void scores(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& prefetch) noexcept {
  const ReadAhead ahead(k, sizeof(StorageOf<T>), prefetch);
  for (std::int32_t token = 0; token < k.tokens; token += kScoreTokens) {
    std::int32_t row = 0;
    for (; kManyRegisters && row + 8 <= s.rows; row += 8) scores_rows<T, 8, 3>(q, row, k, token, s, ahead);
    for (; row + 4 <= s.rows; row += 4) scores_rows<T, 4, kManyRegisters ? 4 : 3>(q, row, k, token, s, ahead);
    for (; row + 2 <= s.rows; row += 2) scores_rows<T, 2, 4>(q, row, k, token, s, ahead);
    if (row < s.rows) scores_rows<T, 1, 4>(q, row, k, token, s, ahead);
  }
}

// ---- online softmax -------------------------------------------------------------------------------------------------

/// Hides the tokens of a row from `visible` on. Returns the largest score before them; NaN is passed over or returned.
HWY_INLINE float mask_and_max(float* s, std::int32_t padded, std::int32_t visible) {
  const F32 f32;
  const I32 i32;
  const Vec none = hn::Set(f32, softmax::kNegInf);
  Vec best = none;
  std::int32_t t = 0;
  for (; t + kLanes <= visible; t += kLanes) best = hn::Max(hn::Load(f32, s + t), best);
  for (; t < padded; t += kLanes) {
    const auto seen = hn::RebindMask(f32, hn::Lt(hn::Iota(i32, t), hn::Set(i32, visible)));
    const Vec x = hn::IfThenElse(seen, hn::Load(f32, s + t), none);
    hn::Store(x, f32, s + t);
    best = hn::Max(x, best);
  }
  return hn::GetLane(hn::MaxOfLanes(f32, best));
}

HWY_INLINE bool has_nan(const float* s, std::int32_t padded) {
  bool found = false;
  for (std::int32_t t = 0; t < padded; ++t) found = found || s[t] != s[t];
  return found;
}

/// Scores times a factor that may turn their order about.
HWY_INLINE void scale_scores(float* s, std::int32_t padded, float scale) {
  const F32 f32;
  const Vec factor = hn::Set(f32, scale);
  for (std::int32_t t = 0; t < padded; t += kLanes) hn::Store(hn::Mul(hn::Load(f32, s + t), factor), f32, s + t);
}

/// Weights of a row whose largest score so far, scaled, is m, in place of its scores; their sum.
HWY_INLINE float weigh(float* s, std::int32_t padded, float scale, float m) {
  const F32 f32;
  const Vec factor = hn::Set(f32, scale);
  const Vec shift = hn::Set(f32, m);
  Vec sum = hn::Zero(f32);
  for (std::int32_t t = 0; t < padded; t += kLanes) {
    const Vec e = exp2_nonpositive(hn::Sub(hn::Mul(hn::Load(f32, s + t), factor), shift));
    hn::Store(e, f32, s + t);
    sum = hn::Add(sum, e);
  }
  return hn::GetLane(hn::SumOfLanes(f32, sum));
}

/// A positive scale keeps the order of scores: the largest is found in unscaled ones, and each is scaled where its weight is computed.
/// Any other scale is applied first. A NaN is found in the sum of the weights and put into m. The largest scores of a few rows are
/// found before their weights are computed, so that no row waits for its own.
void online_softmax(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows) noexcept {
  constexpr std::int32_t kTogether = 8;
  const std::int32_t padded = (tokens + kLanes - 1) / kLanes * kLanes;
  const bool keeps_order = rows.scale > 0.0F;
  const float scale = keeps_order ? rows.scale : 1.0F;
  for (std::int32_t first = 0; first < s.rows; first += kTogether) {
    const std::int32_t end = std::min(first + kTogether, s.rows);
    float tile_max[std::size_t{kTogether}];
    for (std::int32_t r = first; r < end; ++r) {
      if (rows.ahead != nullptr) rows.ahead->ask();
      if (!keeps_order) scale_scores(s.row(r), padded, rows.scale);
      tile_max[r - first] = mask_and_max(s.row(r), padded, rows.visible[r]) * scale;
    }
    for (std::int32_t r = first; r < end; ++r) {
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

// ---- accumulate -----------------------------------------------------------------------------------------------------

/// Adds kTokens tokens to kVectors vectors of each of kRows rows of sums, which the first ones begin; load(t, value) reads the
/// vectors of the t-th token.
template <int kRows, int kTokens, int kVectors, bool kFirst, typename Load>
HWY_INLINE void add_tokens(float* out, std::int32_t stride, const Vec* weights, const Load& load) {
  const F32 f32;
  Vec acc[std::size_t{kRows * kVectors}];
  if constexpr (kFirst) {
    for (int i = 0; i < kRows * kVectors; ++i) acc[i] = hn::Zero(f32);
  } else {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) acc[r * kVectors + i] = hn::Load(f32, out + r * stride + i * kLanes);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    Vec value[std::size_t{kVectors}];
    load(t, value);
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i)
        acc[r * kVectors + i] = hn::MulAdd(weights[r * kTokens + t], value[i], acc[r * kVectors + i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) hn::Store(acc[r * kVectors + i], f32, out + r * stride + i * kLanes);
  }
}

/// sums[r] += sum_t p[r][t] v[t] for kRows rows and kTokens tokens, or = where these are the first.
template <typename T, int kRows, int kTokens, bool kFirst, bool kAsks>
HWY_INLINE void accumulate_block(const RowBuffer& sums, const RowBuffer& p, std::int32_t row, const TokenRows& v,
                                 std::int32_t token, const ReadAhead& ahead) {
  const StorageOf<T>* values[std::size_t{kTokens}];
  const std::byte* later[std::size_t{kTokens}];
  for (int t = 0; t < kTokens; ++t) {
    values[t] = token_row<T>(v, token + t);
    if constexpr (kAsks) later[t] = ahead.row(token + t);
  }
  Vec weights[std::size_t{kRows * kTokens}];
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) weights[r * kTokens + t] = hn::Set(F32(), p.row(row + r)[token + t]);
  }
  float* out = sums.row(row);
  std::int32_t d = 0;
  constexpr std::int32_t kRunVectors = kManyRegisters ? 8 : 4;
  for (; kRows == 1 && d + kRunVectors * kLanes <= v.dims; d += kRunVectors * kLanes) {  // in the order of memory, as scores are
    add_tokens<1, kTokens, kRunVectors, kFirst>(out + d, sums.stride, weights, [&](int t, Vec* value) HWY_ATTR {
      LEAN_UNROLL for (int i = 0; i < kRunVectors; i += 2) {
        const std::int32_t pair = d + i * kLanes;
        for (std::int32_t e = 0; kAsks && e < 2 * kLanes; e += kElementsPerLine<T>) {
          if ((pair + e) % kElementsPerLine<T> == 0) ask_line<T, kRows>(later[t], pair + e);
        }
        value[i] = load_of_pair<T, 0>(values[t] + pair);
        value[i + 1] = load_of_pair<T, 1>(values[t] + pair);
      }
    });
  }
  for (; d + 2 * kLanes <= v.dims; d += 2 * kLanes) {  // sums lie in the same order: restore_values()
    for (std::int32_t i = 0; kAsks && i < 2 * kLanes; i += kElementsPerLine<T>) {
      if ((d + i) % kElementsPerLine<T> == 0) ask_lines<T, kRows, kTokens>(later, d + i);
    }
    add_tokens<kRows, kTokens, 2, kFirst>(out + d, sums.stride, weights, [&](int t, Vec* value) HWY_ATTR {
      value[0] = load_of_pair<T, 0>(values[t] + d);
      value[1] = load_of_pair<T, 1>(values[t] + d);
    });
  }
  if (kAsks && d < v.dims) ask_lines<T, kRows, kTokens>(later, d);
  for (; d < v.dims; d += kLanes) {
    add_tokens<kRows, kTokens, 1, kFirst>(out + d, sums.stride, weights, [&](int t, Vec* value) HWY_ATTR {
      const StorageOf<T>* from = values[t] + d;
      *value = d + kLanes <= v.dims ? Element<T>::load(from) : Element<T>::load_first(from, v.dims - d);
    });
  }
}

/// The next rows from `row` on, as many as registers hold; how many they were. Who asks reads ahead for all of them.
template <typename T, int kTokens, bool kFirst, bool kAsks>
HWY_INLINE std::int32_t accumulate_next(const RowBuffer& sums, const RowBuffer& p, std::int32_t row, const TokenRows& v,
                                        std::int32_t token, const ReadAhead& ahead) {
  if (kManyRegisters && row + 4 <= sums.rows)
    return accumulate_block<T, 4, kTokens, kFirst, kAsks>(sums, p, row, v, token, ahead), 4;
  if (row + 2 <= sums.rows) return accumulate_block<T, 2, kTokens, kFirst, kAsks>(sums, p, row, v, token, ahead), 2;
  return accumulate_block<T, 1, kTokens, kFirst, kAsks>(sums, p, row, v, token, ahead), 1;
}

template <typename T, int kTokens, bool kFirst>
HWY_INLINE void accumulate_rows(const RowBuffer& sums, const RowBuffer& p, const TokenRows& v, std::int32_t token,
                                const ReadAhead& ahead) {
  std::int32_t row = accumulate_next<T, kTokens, kFirst, true>(sums, p, 0, v, token, ahead);
  while (row < sums.rows) row += accumulate_next<T, kTokens, kFirst, false>(sums, p, row, v, token, ahead);
}

/// Vectors of O that stay in registers over a tile: 128 dims of AVX-512.
constexpr int kOneRowVectors = 8;

/// sums[0] = sum_t p[0][t] v[t] of all tokens of a tile, for kOneRowVectors vectors; a row of V is read as a whole, in the order of
/// memory.
template <typename T>
HWY_INLINE void accumulate_one_row(const RowBuffer& sums, const RowBuffer& p, const TokenRows& v, const ReadAhead& ahead) {
  const F32 f32;
  const float* weights = p.row(0);
  Vec acc[std::size_t{kOneRowVectors}];
  LEAN_UNROLL for (Vec& sum : acc) sum = hn::Zero(f32);
  const auto add = [&](const StorageOf<T>* row, const std::byte* later, float weight) HWY_ATTR {
    const Vec factor = hn::Set(f32, weight);
    LEAN_UNROLL for (int i = 0; i < kOneRowVectors; i += 2) {
      const std::int32_t d = i * kLanes;
      for (std::int32_t e = 0; e < 2 * kLanes; e += kElementsPerLine<T>) {
        if ((d + e) % kElementsPerLine<T> == 0) ask_line<T, 1>(later, d + e);
      }
      acc[i] = hn::MulAdd(factor, load_of_pair<T, 0>(row + d), acc[i]);
      acc[i + 1] = hn::MulAdd(factor, load_of_pair<T, 1>(row + d), acc[i + 1]);
    }
  };
  std::int32_t token = 0;
  for (; token + 4 <= v.tokens; token += 4) {
    const std::byte* rows[4];
    const std::byte* later[4];
    v.find<4>(token, rows);
    ahead.find<4>(token, later);
    LEAN_UNROLL for (int t = 0; t < 4; ++t) add(reinterpret_cast<const StorageOf<T>*>(rows[t]), later[t], weights[token + t]);
  }
  for (; token < v.tokens; ++token) add(token_row<T>(v, token), ahead.row(token), weights[token]);
  LEAN_UNROLL for (int i = 0; i < kOneRowVectors; ++i) hn::Store(acc[i], f32, sums.row(0) + i * kLanes);
}

/// o[r] = o[r] rescale[r] + sums[r].
void add_sums(const RowBuffer& o, const RowBuffer& sums, const float* rescale, std::int32_t dims) noexcept {
  for (std::int32_t r = 0; r < o.rows; ++r) {
    const Vec factor = hn::Set(F32(), rescale[r]);
    float* out = o.row(r);
    const float* sum = sums.row(r);
    for (std::int32_t d = 0; d < dims; d += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(F32(), out + d), factor, hn::Load(F32(), sum + d)), F32(), out + d);
    }
  }
}

template <typename T>
void accumulate(const RowBuffer& o, const RowBuffer& sums, const RowBuffer& p, const TokenRows& v, const float* rescale,
                const Prefetch& prefetch) noexcept {
  constexpr std::int32_t kTokens = 4;
  const ReadAhead ahead(v, sizeof(StorageOf<T>), prefetch);
  if (o.rows >= kManyRows) return accumulate_many<T>(o, p, v, rescale, ahead);
  if (kManyRegisters && o.rows == 1 && v.dims == kOneRowVectors * kLanes) {  // fewer dims gain nothing by it
    accumulate_one_row<T>(sums, p, v, ahead);
    return add_sums(o, sums, rescale, v.dims);
  }
  std::int32_t token = 0;
  if (v.tokens >= kTokens) {
    accumulate_rows<T, kTokens, true>(sums, p, v, 0, ahead);
    for (token = kTokens; token + kTokens <= v.tokens; token += kTokens) {
      accumulate_rows<T, kTokens, false>(sums, p, v, token, ahead);
    }
  } else {
    accumulate_rows<T, 1, true>(sums, p, v, token++, ahead);
  }
  for (; token < v.tokens; ++token) accumulate_rows<T, 1, false>(sums, p, v, token, ahead);
  add_sums(o, sums, rescale, v.dims);
}

/// Puts a row of O, which accumulate<T> keeps in the order of V's vectors, back in order.
template <typename T>
void restore_values(float* row, std::int32_t dims) noexcept {
  if constexpr (Element<T>::kPairs) {
    for (std::int32_t d = 0; d + 2 * kLanes <= dims; d += 2 * kLanes) {
      const Vec even = hn::LoadU(F32(), row + d);
      const Vec odd = hn::LoadU(F32(), row + d + kLanes);
      hn::StoreInterleaved2(even, odd, F32(), row + d);
    }
  }
  (void)row;
  (void)dims;
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

void add_scaled(const float* addend, const float* x, float factor, float* out, std::int32_t dims) noexcept {
  const F32 f32;
  const Vec factors = hn::Set(f32, factor);
  for (std::int32_t d = 0; d < dims; d += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(f32, x + d), factors, hn::LoadU(f32, addend + d)), f32, out + d);
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
      .restore_values = {restore_values<float>, restore_values<Half>, restore_values<BFloat16>, restore_values<Float8E4M3>,
                         restore_values<Float8E5M2>},
      .load_row = {load_row<float>, load_row<Half>, load_row<BFloat16>, load_row<Float8E4M3>, load_row<Float8E5M2>},
      .store_row = {store_row<float>, store_row<Half>, store_row<BFloat16>},
      .add_scaled = add_scaled,
#if HWY_TARGET != HWY_SCALAR
      .turned = {&kTurnedTile<float>, &kTurnedTile<Half>, &kTurnedTile<BFloat16>, &kTurnedTile<Float8E4M3>,
                 &kTurnedTile<Float8E5M2>},
#endif
  };
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

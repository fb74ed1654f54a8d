// LeanTile on AVX-512-BF16: bf16 scores and accumulate by vdpbf16ps, which multiplies pairs of bf16 and adds them in fp32. The
// rest of the table is AVX-512's. Highway 1.0 has no such target, hence intrinsics, in this one file, with its own cpuid check.
//
// Order of arithmetic, the same for every row: a lane of a score adds dimension pairs in order, lanes reduce in one tree; a lane
// of a tile's sum adds token pairs in order, O adds tiles. A turned tile, which calls in chunks do not take, adds a score's pairs in
// one chain. P is rounded to bf16 (rounds_probabilities() tells the error bound).
#include "backends/cpu/highway_targets.hpp"
#include "backends/cpu/transpose_words.hpp"
#include "backends/cpu/unroll.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

// Function-level targets: nothing else in this file, or inline code it shares, may use these instructions.
#define LEAN_TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2")))

namespace lean::cpu {
namespace {

constexpr std::int32_t kPairLanes = 32;  // bf16 in a vector
constexpr std::int32_t kSumLanes = 16;   // fp32 in a vector
constexpr std::ptrdiff_t kElementBytes = sizeof(std::uint16_t);

using Sum = __m512;

/// The lanes that exist of a vector that begins `left` elements before its row's end.
LEAN_TARGET_BF16 inline __mmask32 lanes_left(std::int32_t left) {
  return left >= kPairLanes ? ~__mmask32{0} : (__mmask32{1} << left) - 1U;
}

/// Loads a vector; of its lanes that exist, the others zero: never touches what the mask leaves out.
struct WholeVector {
  LEAN_TARGET_BF16 __m512i operator()(const std::uint16_t* p) const { return _mm512_loadu_si512(p); }
};
struct FirstLanes {
  __mmask32 lanes;

  LEAN_TARGET_BF16 __m512i operator()(const std::uint16_t* p) const { return _mm512_maskz_loadu_epi16(lanes, p); }
};

LEAN_TARGET_BF16 inline Sum multiply_pairs(Sum sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

/// Two bf16 side by side in all words of a vector.
LEAN_TARGET_BF16 inline __m512i broadcast_pair(const void* p) {
  std::int32_t pair = 0;
  std::memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}

const std::uint16_t* elements(const std::byte* row) noexcept { return reinterpret_cast<const std::uint16_t*>(row); }

const std::uint16_t* token_row(const TokenRows& rows, std::int32_t token) noexcept { return elements(rows.row(token)); }

/// Lane sums of four accumulators side by side, by one tree.
LEAN_TARGET_BF16 inline void store_lane_sums(const Sum* sums, float* out) {
  const Sum ab = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
  const Sum cd = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
  const Sum abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// ---- scores ---------------------------------------------------------------------------------------------------------

/// Adds the products of one key with kRows queries, `stride` apart, to every `sum_stride`-th sum; beside each of its lines that of the
/// key to ask for is asked for. load(p): a vector of elements.
template <int kRows, bool kAsks, typename TLoad>
LEAN_TARGET_BF16 inline void add_products(Sum* sums, std::int32_t sum_stride, const std::uint16_t* queries, std::int32_t stride,
                                          const std::byte* key_row, const std::byte* later, std::int32_t d, const TLoad& load) {
  if constexpr (kAsks) ask_into_l1(later + d * kElementBytes);
  const __m512i key = load(elements(key_row) + d);
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    sums[r * sum_stride] = multiply_pairs(sums[r * sum_stride], load(queries + r * stride + d), key);
  }
}

/// Tokens past the end repeat the last one and are masked later. One key is read after the other, in the order of memory.
template <int kRows, int kTokens, bool kAsks>
LEAN_TARGET_BF16 inline void scores_block(const QueryRows& q, std::int32_t row, const TokenRows& k, std::int32_t token,
                                          const RowBuffer& s, const ReadAhead& ahead) {
  static_assert(kTokens % 4 == 0);
  const std::byte* keys[std::size_t{kTokens}];
  const std::byte* later[std::size_t{kTokens}] = {};
  if (token + kTokens <= k.tokens) {
    k.find<kTokens>(token, keys);
    if constexpr (kAsks) ahead.find<kTokens>(token, later);
  } else {
    LEAN_UNROLL for (int t = 0; t < kTokens; ++t) {
      const std::int32_t own = std::min(token + t, k.tokens - 1);
      keys[t] = k.row(own);
      later[t] = ahead.row(own);
    }
  }
  const std::int32_t stride = q.f32.stride;
  const std::uint16_t* queries = q.bf16 + std::int64_t{row} * stride;
  Sum sums[std::size_t{kRows * kTokens}];
  LEAN_UNROLL for (int i = 0; i < kRows * kTokens; ++i) sums[i] = _mm512_setzero_ps();
  LEAN_UNROLL for (int t = 0; t < kTokens; ++t) {
    std::int32_t d = 0;
    for (; d + kPairLanes <= k.dims; d += kPairLanes) {
      add_products<kRows, kAsks>(sums + t, kTokens, queries, stride, keys[t], later[t], d, WholeVector());
    }
    if (d < k.dims) {
      add_products<kRows, kAsks>(sums + t, kTokens, queries, stride, keys[t], later[t], d, FirstLanes{lanes_left(k.dims - d)});
    }
  }
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    LEAN_UNROLL for (int t = 0; t < kTokens; t += 4) store_lane_sums(sums + r * kTokens + t, s.row(row + r) + token + t);
  }
}

/// The next rows from `row` on, as many as registers hold; how many they were. Who asks reads ahead for all of them.
template <bool kAsks>
LEAN_TARGET_BF16 inline std::int32_t scores_next(const QueryRows& q, std::int32_t row, const TokenRows& k, std::int32_t token,
                                                 const RowBuffer& s, const ReadAhead& ahead) {
  if (row + 4 <= s.rows) {
    scores_block<4, 4, kAsks>(q, row, k, token, s, ahead);
    if (token + 4 < k.tokens) scores_block<4, 4, kAsks>(q, row, k, token + 4, s, ahead);
    return 4;
  }
  if (row + 2 <= s.rows) return scores_block<2, 8, kAsks>(q, row, k, token, s, ahead), 2;
  return scores_block<1, 8, kAsks>(q, row, k, token, s, ahead), 1;
}

/// Eight tokens meet all rows before the next ones are read.
void scores(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& prefetch) noexcept {
  const ReadAhead ahead(k, kElementBytes, prefetch);
  for (std::int32_t token = 0; token < k.tokens; token += 8) {
    std::int32_t row = scores_next<true>(q, 0, k, token, s, ahead);
    while (row < s.rows) row += scores_next<false>(q, row, k, token, s, ahead);
  }
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

/// 32 values of O as the interleave of two rows of V leaves them: 128-bit lanes 0, 2 of both halves, then lanes 1, 3.
struct Interleaved {
  Sum even;
  Sum odd;
};

/// o = o factor + the tile's sums, put in order.
LEAN_TARGET_BF16 inline void add_sums(const Interleaved& sums, float* o, std::int32_t left, Sum factor) {
  const Sum low = _mm512_shuffle_f32x4(sums.even, sums.odd, 0x44);
  const Sum high = _mm512_shuffle_f32x4(sums.even, sums.odd, 0xEE);
  _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), factor, _mm512_shuffle_f32x4(low, low, 0xD8)));
  if (left <= kSumLanes) return;
  _mm512_storeu_ps(o + kSumLanes, _mm512_fmadd_ps(_mm512_loadu_ps(o + kSumLanes), factor, _mm512_shuffle_f32x4(high, high, 0xD8)));
}

/// Vectors of a row from dim `d` on; beside each the line of the row to ask for is asked for.
template <int kGroups, bool kAsks, typename TLoad>
LEAN_TARGET_BF16 inline void load_groups(const std::byte* row, const std::byte* later, std::int32_t d, const TLoad& load,
                                         __m512i* groups) {
  LEAN_UNROLL for (int g = 0; g < kGroups; ++g, d += kPairLanes) {
    if constexpr (kAsks) ask_into_l1(later + d * kElementBytes);
    groups[g] = load(elements(row) + d);
  }
}

/// One or two rows of V from dim `d` on, kGroups x 32 values, times the pairs of weights at `weights`, `stride` floats apart.
template <int kRows, int kGroups, int kTokens, bool kAsks, typename TLoad>
LEAN_TARGET_BF16 inline void add_tokens(Interleaved* sums, const std::byte* const* rows, const std::byte* const* later,
                                        std::int32_t d, const float* weights, std::int32_t stride, const TLoad& load) {
  __m512i first[std::size_t{kGroups}];
  __m512i second[std::size_t{kGroups}];
  load_groups<kGroups, kAsks>(rows[0], later[0], d, load, first);
  if constexpr (kTokens == 2) {
    load_groups<kGroups, kAsks>(rows[1], later[1], d, load, second);
  } else {
    LEAN_UNROLL for (__m512i& none : second) none = _mm512_setzero_si512();
  }
  __m512i even[std::size_t{kGroups}];
  __m512i odd[std::size_t{kGroups}];
  LEAN_UNROLL for (int g = 0; g < kGroups; ++g) {
    even[g] = _mm512_unpacklo_epi16(first[g], second[g]);
    odd[g] = _mm512_unpackhi_epi16(first[g], second[g]);
  }
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    const __m512i weight = broadcast_pair(weights + r * stride);
    LEAN_UNROLL for (int g = 0; g < kGroups; ++g) {
      Interleaved& sum = sums[r * kGroups + g];
      sum = {multiply_pairs(sum.even, weight, even[g]), multiply_pairs(sum.odd, weight, odd[g])};
    }
  }
}

/// Sums of kRows rows and kGroups x 32 values from dim `d` on, in registers over all tokens of the tile, two tokens a step.
/// `weights` holds P as bf16, so that two neighbouring tokens are one 32-bit word.
template <int kRows, int kGroups, bool kAsks, typename TLoad>
LEAN_TARGET_BF16 inline void accumulate_block(const RowBuffer& o, const RowBuffer& weights, std::int32_t row, const TokenRows& v,
                                              const float* rescale, std::int32_t d, const ReadAhead& ahead, const TLoad& load) {
  Interleaved sums[std::size_t{kRows * kGroups}];
  LEAN_UNROLL for (Interleaved& sum : sums) sum = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const float* weight = weights.row(row);
  std::int32_t token = 0;
  const auto take = [&](auto count) __attribute__((always_inline)) LEAN_TARGET_BF16 {
    constexpr int kTokens = count();
    const std::byte* rows[std::size_t{kTokens}];
    const std::byte* later[std::size_t{kTokens}] = {};
    v.find<kTokens>(token, rows);
    if constexpr (kAsks) ahead.find<kTokens>(token, later);
    LEAN_UNROLL for (int t = 0; t < kTokens; t += 2) {
      add_tokens<kRows, kGroups, std::min(kTokens, 2), kAsks>(sums, rows + t, later + t, d, weight++, weights.stride, load);
    }
    token += kTokens;
  };
  while (token + 4 <= v.tokens) take(std::integral_constant<int, 4>());
  if (token + 2 <= v.tokens) take(std::integral_constant<int, 2>());
  if (token < v.tokens) take(std::integral_constant<int, 1>());
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    const Sum factor = _mm512_set1_ps(rescale[row + r]);
    LEAN_UNROLL for (int g = 0; g < kGroups; ++g) {
      add_sums(sums[r * kGroups + g], o.row(row + r) + d + g * kPairLanes, v.dims - d - g * kPairLanes, factor);
    }
  }
}

template <int kRows, int kGroups, bool kAsks>
LEAN_TARGET_BF16 inline void accumulate_rows(const RowBuffer& o, const RowBuffer& weights, std::int32_t row, const TokenRows& v,
                                             const float* rescale, const ReadAhead& ahead) {
  std::int32_t d = 0;
  for (; d + kGroups * kPairLanes <= v.dims; d += kGroups * kPairLanes) {
    accumulate_block<kRows, kGroups, kAsks>(o, weights, row, v, rescale, d, ahead, WholeVector());
  }
  for (; d + 2 * kPairLanes <= v.dims; d += 2 * kPairLanes) {
    accumulate_block<kRows, 2, kAsks>(o, weights, row, v, rescale, d, ahead, WholeVector());
  }
  for (; d < v.dims; d += kPairLanes) {
    accumulate_block<kRows, 1, kAsks>(o, weights, row, v, rescale, d, ahead, FirstLanes{lanes_left(v.dims - d)});
  }
}

/// The next rows from `row` on; how many they were. Where V has 128 dims two with all of them rather than four with half: its rows
/// then come in the order of memory.
template <bool kAsks>
LEAN_TARGET_BF16 inline std::int32_t accumulate_next(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const TokenRows& v,
                                                     const float* rescale, const ReadAhead& ahead) {
  if (row + 4 <= o.rows && v.dims < 4 * kPairLanes) return accumulate_rows<4, 2, kAsks>(o, p, row, v, rescale, ahead), 4;
  if (row + 2 <= o.rows) return accumulate_rows<2, 4, kAsks>(o, p, row, v, rescale, ahead), 2;
  return accumulate_rows<1, 4, kAsks>(o, p, row, v, rescale, ahead), 1;
}

/// Rounds P to bf16 in place, row by row; the zeros behind the last token stay zeros.
LEAN_TARGET_BF16 inline void round_weights(const RowBuffer& p, std::int32_t tokens) {
  for (std::int32_t r = 0; r < p.rows; ++r) {
    float* row = p.row(r);
    for (std::int32_t t = 0; t < tokens; t += kSumLanes) {
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(row + t));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(row) + t),
                          reinterpret_cast<__m256i>(rounded));
    }
  }
}

void accumulate(const RowBuffer& o, const RowBuffer& /* registers hold the sums */, const RowBuffer& p, const TokenRows& v,
                const float* rescale, const Prefetch& prefetch) noexcept {
  round_weights(p, v.tokens);
  const ReadAhead ahead(v, kElementBytes, prefetch);
  std::int32_t row = accumulate_next<true>(o, p, 0, v, rescale, ahead);
  while (row < o.rows) row += accumulate_next<false>(o, p, row, v, rescale, ahead);
}

// ---- many rows ------------------------------------------------------------------------------------------------------
// As in many_rows-inl.hpp, with words of two bf16 in place of elements.

constexpr std::int32_t kTurned = 16;                 // tokens whose words are turned at once, each with a vector of dims
constexpr std::int32_t kPanelWords = 2 * kSumLanes;  // of a panel's line: tokens of K, dims of V
constexpr std::int32_t kRowsTogether = 16;           // that go through all stages: their scores stay in the L1

using PanelLine = std::uint32_t[kPanelWords];

/// Lines of a panel of K: pairs of dims, padded to whole vectors.
constexpr std::int32_t key_lines(std::int32_t dims) noexcept { return (dims + kPairLanes - 1) / kPairLanes * kTurned; }

/// K as panels of kPanelWords tokens: line p of a panel is pair p of the dims. Tokens past the end repeat the last one.
LEAN_TARGET_BF16 inline void turn_keys(const TokenRows& k, const ReadAhead& ahead, PanelLine* lines) {
  for (std::int32_t token = 0; token < k.tokens; token += kPanelWords, lines += key_lines(k.dims)) {
    for (std::int32_t t = 0; t < kPanelWords; t += kTurned) {
      for (std::int32_t d = 0; d < k.dims; d += kPairLanes) {
        const FirstLanes load{lanes_left(k.dims - d)};
        __m512i words[std::size_t{kTurned}];
        LEAN_UNROLL for (int i = 0; i < kTurned; ++i) words[i] = load(token_row(k, std::min(token + t + i, k.tokens - 1)) + d);
        transpose_words(words);
        LEAN_UNROLL for (int p = 0; p < kTurned; ++p) _mm512_store_si512(lines[d / 2 + p] + t, words[p]);
      }
      for (std::int32_t i = 0; i < kTurned && token + t + i < k.tokens; ++i) ahead.ask_row(token + t + i);
    }
  }
}

/// Elements i of two vectors side by side in word i, of the first or the second half of them.
LEAN_TARGET_BF16 inline __m512i pair_up(__m512i first, __m512i second, int half) {
  std::uint16_t order[std::size_t{kPairLanes}];
  for (int i = 0; i < kPairLanes; ++i) order[i] = static_cast<std::uint16_t>(i % 2 * kPairLanes + half * kSumLanes + i / 2);
  return _mm512_permutex2var_epi16(first, _mm512_loadu_si512(order), second);
}

/// V as panels of kPanelWords dims: line p of a panel is pair p of the tokens, a token of zeros behind an odd last one.
LEAN_TARGET_BF16 inline void turn_values(const TokenRows& v, const ReadAhead& ahead, PanelLine* lines) {
  for (std::int32_t d = 0; d < v.dims; d += kPanelWords) {
    const FirstLanes load{lanes_left(v.dims - d)};
    for (std::int32_t t = 0; t < v.tokens; t += 2, ++lines) {
      const bool is_pair = t + 1 < v.tokens;
      if (d == 0) ahead.ask_row(t);  // once for each token
      if (d == 0 && is_pair) ahead.ask_row(t + 1);
      const __m512i first = load(token_row(v, t) + d);
      const __m512i second = is_pair ? load(token_row(v, t + 1) + d) : _mm512_setzero_si512();
      _mm512_store_si512(*lines, pair_up(first, second, 0));
      _mm512_store_si512(*lines + kSumLanes, pair_up(first, second, 1));
    }
  }
}

/// sums[r][i] = sum_j factors[r][j] panel[j][i] of words, one j after the other; kRows rows, `stride_bytes` apart.
template <int kRows>
LEAN_TARGET_BF16 inline void multiply_panel(const void* factors, std::int64_t stride_bytes, const PanelLine* lines,
                                            std::int32_t count, Sum (*sums)[2]) {
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const auto* words = static_cast<const std::byte*>(factors);
  for (std::int32_t j = 0; j < count; ++j, words += sizeof(std::uint32_t)) {
    const __m512i line[2] = {_mm512_load_si512(lines[j]), _mm512_load_si512(lines[j] + kSumLanes)};
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i factor = broadcast_pair(words + r * stride_bytes);
      LEAN_UNROLL for (int i = 0; i < 2; ++i) sums[r][i] = multiply_pairs(sums[r][i], factor, line[i]);
    }
  }
}

template <int kRows>
LEAN_TARGET_BF16 void score_rows(const TurnedRun& run, std::int32_t row) noexcept {
  const TurnedCall& call = run.call;
  const auto* lines = static_cast<const PanelLine*>(call.turned_k);
  const std::int64_t stride = call.q.f32.stride;
  for (std::int32_t token = 0; token < run.tokens; token += kPanelWords, lines += key_lines(call.k.dims)) {
    Sum sums[std::size_t{kRows}][2];
    multiply_panel<kRows>(call.q.bf16 + (run.first + row) * stride, 2 * stride, lines, (call.k.dims + 1) / 2, sums);
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      LEAN_UNROLL for (int i = 0; i < 2; ++i) _mm512_storeu_ps(run.s().row(row + r) + token + i * kSumLanes, sums[r][i]);
    }
  }
}

template <int kRows>
LEAN_TARGET_BF16 void add_rows(const TurnedRun& run, std::int32_t row) noexcept {
  const TurnedCall& call = run.call;
  const auto* lines = static_cast<const PanelLine*>(call.turned_v);
  const RowBuffer s = run.s();
  const float* rescale = call.softmax.rescale + run.first + row;
  for (std::int32_t d = 0; d < call.v.dims; d += kPanelWords, lines += (call.v.tokens + 1) / 2) {
    Sum sums[std::size_t{kRows}][2];
    multiply_panel<kRows>(s.row(row), 4 * std::int64_t{s.stride}, lines, (run.tokens + 1) / 2, sums);
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      float* o = call.o.row(run.first + row + r) + d;
      const Sum factor = _mm512_set1_ps(rescale[r]);
      _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), factor, sums[r][0]));
      if (d + kSumLanes >= call.v.dims) continue;
      _mm512_storeu_ps(o + kSumLanes, _mm512_fmadd_ps(_mm512_loadu_ps(o + kSumLanes), factor, sums[r][1]));
    }
  }
}

/// f(std::integral_constant of how many, the first) for the rows whose sums are in registers together.
template <typename TF>
void for_rows(std::int32_t rows, const TF& f) {
  std::int32_t row = 0;
  for (; row + 8 <= rows; row += 8) f(std::integral_constant<int, 8>(), row);
  for (; row + 2 <= rows; row += 2) f(std::integral_constant<int, 2>(), row);
  if (row < rows) f(std::integral_constant<int, 1>(), row);
}

void score(const TurnedRun& run) noexcept {
  for_rows(run.rows, [&](auto count, std::int32_t row) { score_rows<count()>(run, row); });
}

void weigh_and_add(const TurnedRun& run, bool is_scaled) noexcept {
  avx512_kernels()->online_softmax(run.s(), run.tokens, run.call.softmax_of(run.first, is_scaled));
  round_weights(run.s(), run.tokens);
  for_rows(run.rows, [&](auto count, std::int32_t row) { add_rows<count()>(run, row); });
}

void compute_turned(const TurnedCall& call) noexcept {
  turn_keys(call.k, ReadAhead(call.k, kElementBytes, call.with_scores), static_cast<PanelLine*>(call.turned_k));
  const auto lay_values = [&] {
    turn_values(call.v, ReadAhead(call.v, kElementBytes, call.with_accumulate), static_cast<PanelLine*>(call.turned_v));
  };
  take_turned(call, kRowsTogether, lay_values, score, weigh_and_add);
}

constexpr TurnedTile kTurnedTile{
    .from_rows = kManyRows, .serves = [](std::int32_t) noexcept { return true; }, .compute = compute_turned};

/// accumulate leaves O in order.
void keep_values(float*, std::int32_t) noexcept {}

}  // namespace

const TileKernels* avx512_bf16_kernels() noexcept {
  static const std::optional<TileKernels> kernels = []() -> std::optional<TileKernels> {
    const TileKernels* avx512 = avx512_kernels();
    if (avx512 == nullptr || __builtin_cpu_supports("avx512bf16") == 0) return std::nullopt;
    TileKernels table = *avx512;
    table.name = "AVX-512-BF16";
    table.scores[table_index(DType::kBFloat16)] = scores;
    table.accumulate[table_index(DType::kBFloat16)] = accumulate;
    table.restore_values[table_index(DType::kBFloat16)] = keep_values;
    table.turned[table_index(DType::kBFloat16)] = &kTurnedTile;
    return table;
  }();
  return kernels ? &*kernels : nullptr;
}

}  // namespace lean::cpu

#else

namespace lean::cpu {
const TileKernels* avx512_bf16_kernels() noexcept { return nullptr; }
}  // namespace lean::cpu

#endif

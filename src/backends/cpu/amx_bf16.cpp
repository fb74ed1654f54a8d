// LeanTile on AMX: bf16 scores and accumulate by tdpbf16ps, which multiplies 16 rows by 16 columns, 32 bf16 deep. The rest of the
// table is AVX-512's, and so are heads whose dims are not whole vectors of 32. Tiles of many rows are amx_turned_tile.cpp's.
//
// Scores are the product of K, as it lies in memory, with the queries laid out as word pairs once a tile; the sums come out token
// by token and are transposed. O = P V wants pairs of tokens: V's rows are interleaved on the way into a small buffer, and O
// keeps the order that this leaves until restore_values().
//
// Order of arithmetic, the same for every row: pairs of dims in order, pairs of tokens in order, one chain a sum of a tile; O
// adds tiles. P is rounded to bf16 (rounds_probabilities() tells the error bound).
#include "backends/cpu/highway_targets.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "backends/cpu/amx_registers-inl.hpp"
#include "backends/cpu/amx_turned_tile.hpp"

namespace lean::cpu {
namespace {

constexpr std::int32_t kStripeChunks = 2;  // of 32 dims whose sums stay in registers over a tile
constexpr std::int32_t kScoreBlocks = 4;   // of 16 tokens that meet a chunk of the queries together

// ---- scores ---------------------------------------------------------------------------------------------------------

/// Sums of 16 tokens with 16 queries, token by token, become rows of s.
LEAN_TARGET_AMX inline void store_scores(const PackedTile& sums, const RowBuffer& s, std::int32_t row, std::int32_t rows,
                                         std::int32_t token) {
  __m512i words[kTileRows];
  LEAN_UNROLL for (int t = 0; t < kTileRows; ++t) words[t] = _mm512_load_si512(sums.words[t]);
  transpose_words(words);
  LEAN_UNROLL for (int r = 0; r < kTileRows; ++r) {
    if (r < rows) _mm512_storeu_si512(s.row(row + r) + token, words[r]);
  }
}

/// 16 keys in a row: where they lie if they are evenly spaced and exist, else copies, with zeros for tokens past the end.
struct KeyBlock {
  const void* data;
  std::int64_t stride;
};

/// True where 16 rows of a table are evenly spaced, as those of a page.
LEAN_TARGET_AMX inline bool evenly_spaced(const std::byte* const* rows, std::int64_t stride) {
  const auto differ = [&](int first) LEAN_TARGET_AMX {  // eight rows from their predecessors
    const __m512i steps = _mm512_sub_epi64(_mm512_loadu_si512(rows + first + 1), _mm512_loadu_si512(rows + first));
    return _mm512_cmpneq_epi64_mask(steps, _mm512_set1_epi64(stride));
  };
  return differ(0) == 0 && differ(kTileRows - 9) == 0;
}

LEAN_TARGET_AMX inline KeyBlock key_block(const TokenRows& k, std::int32_t token, std::uint16_t* copies) {
  const bool whole = token + kTileRows <= k.tokens;
  if (whole && (k.table == nullptr || evenly_spaced(k.table + token, k.token_stride_bytes)))
    return {k.row(token), k.token_stride_bytes};
  for (std::int32_t t = 0; t < kTileRows; ++t) {
    std::uint16_t* copy = copies + t * k.dims;
    for (std::int32_t d = 0; d < k.dims; d += kPairLanes) {
      const bool exists = token + t < k.tokens;
      _mm512_storeu_si512(copy + d, exists ? _mm512_loadu_si512(token_row(k, token + t) + d) : _mm512_setzero_si512());
    }
  }
  return {copies, std::int64_t{k.dims} * 2};
}

/// Scores of kTileRows rows with kBlocks x 16 tokens from `token` on.
template <int kBlocks>
LEAN_TARGET_AMX inline void scores_block(const PackedTile* queries, std::int32_t row, const TokenRows& k, std::int32_t token,
                                         const RowBuffer& s, RowsAhead& ahead) {
  alignas(64) std::uint16_t copies[std::size_t{kBlocks}][std::size_t{kTileRows * kMaxChunks * kPairLanes}];
  KeyBlock keys[std::size_t{kBlocks}];
  for (int b = 0; b < kBlocks; ++b) keys[b] = key_block(k, token + b * kTileRows, copies[b]);
  const std::int32_t chunks = k.dims / kPairLanes;
  const auto key = [&](int b, std::int32_t chunk) { return static_cast<const std::byte*>(keys[b].data) + chunk * 64; };
  _tile_zero(0);
  if constexpr (kBlocks > 1) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
    _tile_loadd(6, queries + chunk, 64);
    _tile_loadd(4, key(0, chunk), keys[0].stride);
    _tile_dpbf16ps(0, 4, 6);
    ahead.ask();
    if constexpr (kBlocks > 1) {
      _tile_loadd(5, key(1, chunk), keys[1].stride);
      _tile_dpbf16ps(1, 5, 6);
      ahead.ask();
      _tile_loadd(4, key(2, chunk), keys[2].stride);
      _tile_dpbf16ps(2, 4, 6);
      ahead.ask();
      _tile_loadd(5, key(3, chunk), keys[3].stride);
      _tile_dpbf16ps(3, 5, 6);
      ahead.ask();
    }
  }
  const std::int32_t rows = std::min(kTileRows, s.rows - row);
  PackedTile sums[std::size_t{kBlocks}];
  _tile_stored(0, sums, 64);
  if constexpr (kBlocks > 1) {
    _tile_stored(1, sums + 1, 64);
    _tile_stored(2, sums + 2, 64);
    _tile_stored(3, sums + 3, 64);
  }
  for (int b = 0; b < kBlocks; ++b) store_scores(sums[b], s, row, rows, token + b * kTileRows);
}

LEAN_TARGET_AMX void scores(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& prefetch) noexcept {
  if (!whole_vectors(k)) return avx512_kernels()->scores[table_index(DType::kBFloat16)](q, k, s, prefetch);
  const std::int32_t products =
      (s.rows + kTileRows - 1) / kTileRows * (k.dims / kPairLanes) * ((k.tokens + kTileRows - 1) / kTileRows);
  RowsAhead none;
  RowsAhead& ahead = prefetch.ahead != nullptr ? *prefetch.ahead : none;
  ahead.share(kScoresEighths, products);
  Tiles tiles;
  tiles.shape(kTileRows);
  for (std::int32_t row = 0; row < s.rows; row += kTileRows) {
    PackedTile queries[kMaxChunks];
    for (std::int32_t chunk = 0; chunk < k.dims / kPairLanes; ++chunk) {
      const auto query = [&](int r) { return q.bf16 + std::int64_t{row + r} * q.f32.stride; };
      pack_columns(query, std::min(kTileRows, s.rows - row), chunk, queries[chunk]);
    }
    std::int32_t token = 0;
    for (; token + kScoreBlocks * kTileRows <= k.tokens; token += kScoreBlocks * kTileRows) {
      scores_block<kScoreBlocks>(queries, row, k, token, s, ahead);
    }
    for (; token < k.tokens; token += kTileRows) scores_block<1>(queries, row, k, token, s, ahead);
  }
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

/// Sums of up to 16 rows and kChunks x 32 dims from `chunk` on in registers over all tokens of the tile. values_of(block): the
/// second factors of 32 tokens.
template <int kChunks, typename TValuesOf>
LEAN_TARGET_AMX inline void multiply_rows(const RowBuffer& sum_rows, const RowBuffer& weights, std::int32_t row, std::int32_t chunk,
                                          std::int32_t blocks, RowsAhead& ahead, const TValuesOf& values_of) {
  float* sums = sum_rows.row(row) + chunk * kPairLanes;
  const std::int64_t sum_bytes = std::int64_t{sum_rows.stride} * 4;
  const std::int64_t p_bytes = std::int64_t{weights.stride} * 4;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kChunks > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto* p = reinterpret_cast<const std::uint16_t*>(weights.row(row));
  for (std::int32_t block = 0; block < blocks; ++block) {
    const PackedTile* values = values_of(block);
    _tile_loadd(4, p + block * kBlockTokens, p_bytes);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    ahead.ask();
    _tile_loadd(7, values + 1, 64);
    _tile_dpbf16ps(1, 4, 7);
    ahead.ask();
    if constexpr (kChunks > 1) {
      _tile_loadd(6, values + 2, 64);
      _tile_dpbf16ps(2, 4, 6);
      ahead.ask();
      _tile_loadd(7, values + 3, 64);
      _tile_dpbf16ps(3, 4, 7);
      ahead.ask();
    }
  }
  _tile_stored(0, sums, sum_bytes);
  _tile_stored(1, sums + kSumLanes, sum_bytes);
  if constexpr (kChunks > 1) {
    _tile_stored(2, sums + 2 * kSumLanes, sum_bytes);
    _tile_stored(3, sums + 3 * kSumLanes, sum_bytes);
  }
}

/// Up to 16 rows: each block of V is turned where it is multiplied, in a buffer that stays in the L1.
template <int kChunks>
LEAN_TARGET_AMX inline void multiply_few_rows(const RowBuffer& sums, const RowBuffer& p, const TokenRows& v, std::int32_t chunk,
                                              std::int32_t blocks, RowsAhead& ahead) {
  PackedTile values[2][std::size_t{2 * kChunks}];  // in turn, so that one is filled while the other is loaded
  RowsAhead none;
  multiply_rows<kChunks>(sums, p, 0, chunk, blocks, none, [&](std::int32_t block) LEAN_TARGET_AMX {
    PackedTile* out = values[block % 2];
    pack_block(v, block * kBlockTokens, chunk, kChunks, ahead, out);
    return static_cast<const PackedTile*>(out);
  });
}

/// f(std::integral_constant of how many, the first) for each stripe of 32-dim chunks whose sums are in registers together.
template <typename TF>
[[gnu::always_inline]] inline void for_stripes(std::int32_t chunks, const TF& f) {
  std::int32_t chunk = 0;
  for (; chunk + kStripeChunks <= chunks; chunk += kStripeChunks) f(std::integral_constant<int, kStripeChunks>(), chunk);
  if (chunk < chunks) f(std::integral_constant<int, 1>(), chunk);
}

LEAN_TARGET_AMX void accumulate(const RowBuffer& o, const RowBuffer& sums, const RowBuffer& p, const TokenRows& v,
                                const float* rescale, const Prefetch& prefetch) noexcept {
  if (!whole_vectors(v)) return avx512_kernels()->accumulate[table_index(DType::kBFloat16)](o, sums, p, v, rescale, prefetch);
  round_weights(p, v.tokens);
  const std::int32_t chunks = v.dims / kPairLanes;
  const std::int32_t blocks = (v.tokens + kBlockTokens - 1) / kBlockTokens;
  const bool few_rows = o.rows <= kTileRows;
  const std::int32_t row_blocks = (o.rows + kTileRows - 1) / kTileRows;
  const std::int32_t stripes = (chunks + kStripeChunks - 1) / kStripeChunks;
  RowsAhead none;
  RowsAhead& ahead = prefetch.ahead != nullptr ? *prefetch.ahead : none;
  ahead.share(kAccumulateEighths, few_rows ? stripes * blocks * kTileRows : row_blocks * blocks * 2 * chunks);
  Tiles tiles;
  if (few_rows) {
    tiles.shape(o.rows);
    for_stripes(chunks, [&](auto count, std::int32_t chunk)
                            LEAN_TARGET_AMX { multiply_few_rows<count()>(sums, p, v, chunk, blocks, ahead); });
  } else {
    PackedTile values[kMaxValueTiles];
    turn_values(v, values);
    for (std::int32_t row = 0; row < o.rows; row += kTileRows) {
      tiles.shape(std::min(kTileRows, o.rows - row));
      for_stripes(chunks, [&](auto count, std::int32_t chunk) LEAN_TARGET_AMX {
        multiply_rows<count()>(sums, p, row, chunk, blocks, ahead, [&](std::int32_t block) {
          return values + std::int64_t{2} * (std::int64_t{block} * chunks + chunk);
        });
      });
    }
  }
  add_sums(o, sums, rescale, v.dims);
}

/// Each 32 dims of O lie as the interleave of two rows of V left them: the lower halves of 128 bits, then the upper ones.
LEAN_TARGET_AMX void restore_values(float* row, std::int32_t dims) noexcept {
  if (dims % kPairLanes != 0) return avx512_kernels()->restore_values[table_index(DType::kBFloat16)](row, dims);
  for (std::int32_t d = 0; d < dims; d += kPairLanes) {
    const __m512 lower = _mm512_loadu_ps(row + d);
    const __m512 upper = _mm512_loadu_ps(row + d + kSumLanes);
    const __m512 first = _mm512_shuffle_f32x4(lower, upper, 0x44);  // quarters: lower 0, lower 1, upper 0, upper 1
    const __m512 last = _mm512_shuffle_f32x4(lower, upper, 0xEE);
    _mm512_storeu_ps(row + d, _mm512_shuffle_f32x4(first, first, 0xD8));
    _mm512_storeu_ps(row + d + kSumLanes, _mm512_shuffle_f32x4(last, last, 0xD8));
  }
}

/// cpuid leaf 7, edx: bit 22 amx-bf16, bit 24 amx-tile (g++ 12 does not know the names); and Linux lends tile registers to a
/// process that asks (arch_prctl, ARCH_REQ_XCOMP_PERM, Linux 5.16).
bool runs_amx_bf16() noexcept {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 22 & 1U) != 0 && (edx >> 24 & 1U) != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const TileKernels* amx_bf16_kernels() noexcept {
  static const std::optional<TileKernels> kernels = []() -> std::optional<TileKernels> {
    const TileKernels* avx512 = avx512_kernels();
    if (avx512 == nullptr || __builtin_cpu_supports("avx512bf16") == 0 || !runs_amx_bf16()) return std::nullopt;
    TileKernels table = *avx512;
    table.name = "AMX-BF16";
    table.asks_ahead = true;
    table.scores[table_index(DType::kBFloat16)] = scores;
    table.accumulate[table_index(DType::kBFloat16)] = accumulate;
    table.restore_values[table_index(DType::kBFloat16)] = restore_values;
    table.turned[table_index(DType::kBFloat16)] = &amx_turned_tile();
    return table;
  }();
  return kernels ? &*kernels : nullptr;
}

}  // namespace lean::cpu

#else

namespace lean::cpu {
const TileKernels* amx_bf16_kernels() noexcept { return nullptr; }
}  // namespace lean::cpu

#endif

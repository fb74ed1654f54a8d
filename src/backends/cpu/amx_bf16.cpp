// LeanTile on AMX: bf16 scores and accumulate by tdpbf16ps, which multiplies 16 rows by 16 columns, 32 bf16 deep. The rest of the
// table is AVX-512's, and so are heads whose dims are not whole vectors of 32. Intrinsics, in this one file, with its own check.
//
// Scores are the product of K, as it lies in memory, with the queries laid out as word pairs once a tile; the sums come out token
// by token and are transposed. O = P V wants pairs of tokens: V's rows are interleaved on the way into a small buffer, and O
// keeps the order that this leaves until restore_values().
//
// Order of arithmetic, the same for every row: pairs of dims in order, pairs of tokens in order, one chain a sum of a tile; O
// adds tiles. P is rounded to bf16 (rounds_probabilities() tells the error bound).
#include "backends/cpu/highway_targets.hpp"
#include "backends/cpu/transpose_words.hpp"
#include "backends/cpu/unroll.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "lean/float_types.hpp"

// Function-level targets: nothing else in this file, or inline code it shares, may use these instructions.
#define LEAN_TARGET_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2")))

namespace lean::cpu {
namespace {

constexpr std::int32_t kTileRows = 16;                                            // of a tile register: 16 rows of 64 bytes
constexpr std::int32_t kSumLanes = 16;                                            // fp32 in a row
constexpr std::int32_t kPairLanes = 32;                                           // bf16 in a row
constexpr std::int32_t kMaxChunks = (kMaxHeadDim + kPairLanes - 1) / kPairLanes;  // of a row
constexpr std::int32_t kStripeChunks = 2;  // of 32 dims whose sums stay in registers over a tile
constexpr std::int32_t kScoreBlocks = 4;   // of 16 tokens that meet a chunk of the queries together
constexpr std::int32_t kBlockTokens = 32;  // of P and V that one product takes
/// A LeanTile has 64 KB of K and V and a multiple of 16 tokens (select_tile()); all of that may be V, rounded up to whole blocks.
constexpr std::size_t kMaxValueTiles = (64 * 1024 + kTileRows * kMaxHeadDim * 2 + 1023) / 1024;

/// What ldtilecfg reads (Intel SDM, volume 1, 18.2): palette 1; bytes of a row and rows of each of the eight registers.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  /// Registers 0 to 5, sums and first factors, have `count` rows; 6 and 7, second factors, all 16.
  explicit TileShapes(std::int32_t count) noexcept {
    for (int i = 0; i < 8; ++i) {
      row_bytes[i] = 64;
      rows[i] = static_cast<std::uint8_t>(i < 6 ? count : kTileRows);
    }
  }
};

/// Tile registers in use, and given back at the end: until then each switch of threads saves 8 KB.
class Tiles {
 public:
  Tiles() = default;
  LEAN_TARGET_AMX ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  LEAN_TARGET_AMX void shape(std::int32_t rows) noexcept {
    if (rows == rows_) return;
    rows_ = rows;
    const TileShapes shapes(rows);
    _tile_loadconfig(&shapes);
  }

 private:
  std::int32_t rows_ = 0;
};

struct alignas(64) PackedTile {
  std::uint32_t words[kTileRows][kSumLanes];
};

const std::uint16_t* token_row(const TokenRows& rows, std::int32_t token) noexcept {
  return reinterpret_cast<const std::uint16_t*>(rows.row(token));
}

bool whole_vectors(const TokenRows& rows) noexcept { return rows.dims % kPairLanes == 0; }

// ---- scores ---------------------------------------------------------------------------------------------------------

/// Dims [32 chunk, 32 chunk + 32) of up to 16 rows as the second factor: word p of row n goes to row p, column n. Zeros for no row.
template <typename TRowOf>
LEAN_TARGET_AMX inline void pack_columns(const TRowOf& row_of, std::int32_t rows, std::int32_t chunk, PackedTile& out) {
  __m512i words[kTileRows];
  LEAN_UNROLL for (int r = 0; r < kTileRows; ++r) {
    words[r] = r < rows ? _mm512_loadu_si512(row_of(r) + chunk * kPairLanes) : _mm512_setzero_si512();
  }
  transpose_words(words);
  LEAN_UNROLL for (int p = 0; p < kTileRows; ++p) _mm512_store_si512(out.words[p], words[p]);
}

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

/// Rounds P to bf16 in place, row by row, and ends it with zeros up to whole blocks.
LEAN_TARGET_AMX inline void round_weights(const RowBuffer& p, std::int32_t tokens) {
  for (std::int32_t r = 0; r < p.rows; ++r) {
    float* row = p.row(r);
    auto* rounded = reinterpret_cast<std::uint16_t*>(row);
    std::int32_t t = 0;
    for (; t < tokens; t += kSumLanes) {
      const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(row + t));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + t), reinterpret_cast<__m256i>(half));
    }
    if (t % kBlockTokens != 0) _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + t), _mm256_setzero_si256());
  }
}

/// A row of V, or of zeros where there is no token.
struct ValueRow {
  const std::uint16_t* row;

  LEAN_TARGET_AMX __m512i operator()(std::int32_t chunk) const { return _mm512_loadu_si512(row + chunk * kPairLanes); }
};
struct ValueRowOrZeros {
  const std::uint16_t* row;

  LEAN_TARGET_AMX __m512i operator()(std::int32_t chunk) const {
    return row != nullptr ? _mm512_loadu_si512(row + chunk * kPairLanes) : _mm512_setzero_si512();
  }
};

/// Two rows of V as row `pair` of second factors, two for each 32 dims: even ones get the words of the lower half of each 128 bits,
/// odd ones of the upper.
template <typename TRow>
LEAN_TARGET_AMX inline void pack_pair(const TRow& first_row, const TRow& second_row, std::int32_t chunks, std::int32_t pair,
                                      PackedTile* out) {
  for (std::int32_t c = 0; c < chunks; ++c) {
    const __m512i first = first_row(c);
    const __m512i second = second_row(c);
    _mm512_store_si512(out[2 * c].words[pair], _mm512_unpacklo_epi16(first, second));
    _mm512_store_si512(out[2 * c + 1].words[pair], _mm512_unpackhi_epi16(first, second));
  }
}

/// 32 tokens of V from `token` on, `chunks` x 32 dims of them from `chunk` on: two second factors for each 32 dims, pairs of tokens
/// side by side.
[[gnu::always_inline]] LEAN_TARGET_AMX inline void pack_block(const TokenRows& v, std::int32_t token, std::int32_t chunk,
                                                              std::int32_t chunks, RowsAhead& ahead, PackedTile* out) {
  const auto row = [&](std::int32_t t) { return token_row(v, t) + chunk * kPairLanes; };
  for (std::int32_t pair = 0; pair < kTileRows; ++pair) {
    const std::int32_t t = token + 2 * pair;
    ahead.ask();
    if (t + 1 < v.tokens) {
      pack_pair(ValueRow{row(t)}, ValueRow{row(t + 1)}, chunks, pair, out);
    } else {
      pack_pair(ValueRowOrZeros{t < v.tokens ? row(t) : nullptr}, ValueRowOrZeros{nullptr}, chunks, pair, out);
    }
  }
}

/// All of V, block by block.
LEAN_TARGET_AMX inline void turn_values(const TokenRows& v, PackedTile* out) {
  const std::int32_t chunks = v.dims / kPairLanes;
  RowsAhead none;
  for (std::int32_t token = 0; token < v.tokens; token += kBlockTokens, out += std::int64_t{2} * chunks) {
    pack_block(v, token, 0, chunks, none, out);
  }
}

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

/// o[r] = o[r] rescale[r] + sums[r].
LEAN_TARGET_AMX inline void add_sums(const RowBuffer& o, const RowBuffer& sums, const float* rescale, std::int32_t dims) {
  for (std::int32_t r = 0; r < o.rows; ++r) {
    const __m512 factor = _mm512_set1_ps(rescale[r]);
    float* row = o.row(r);
    const float* sum = sums.row(r);
    for (std::int32_t d = 0; d < dims; d += kSumLanes) {
      _mm512_storeu_ps(row + d, _mm512_fmadd_ps(_mm512_loadu_ps(row + d), factor, _mm512_loadu_ps(sum + d)));
    }
  }
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

// ---- turned tiles ---------------------------------------------------------------------------------------------------
//
// Two by two registers of sums: each factor that is loaded is multiplied twice, and K and V, which lie in the L2, are read once for
// 32 rows.

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

// ---- the softmax of a turned tile -------------------------------------------------------------------------------------
//
// lean_tile-inl.hpp's, bit for bit, but that weights are left in bf16.

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
    table.scores_of_many[table_index(DType::kBFloat16)] = scores;
    table.accumulate[table_index(DType::kBFloat16)] = accumulate;
    table.restore_values[table_index(DType::kBFloat16)] = restore_values;
    table.turned = &kTurnedTile;
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

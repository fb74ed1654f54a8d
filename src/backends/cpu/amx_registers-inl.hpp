// AMX's tile registers, and how rows of K, Q and V become second factors of tdpbf16ps: what both files of kernels on it share
// (amx_bf16.cpp, amx_turned_tile.cpp). Compiled into each by itself, since a test takes registers in software; where __x86_64__ and
// __linux__ are defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/transpose_words.hpp"
#include "backends/cpu/unroll.hpp"

// Function-level targets: nothing else in a file that includes this, or inline code it shares, may use these instructions.
#define LEAN_TARGET_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2")))

namespace lean::cpu {
namespace {

constexpr std::int32_t kTileRows = 16;                                            // of a tile register: 16 rows of 64 bytes
constexpr std::int32_t kSumLanes = 16;                                            // fp32 in a row
constexpr std::int32_t kPairLanes = 32;                                           // bf16 in a row
constexpr std::int32_t kMaxChunks = (kMaxHeadDim + kPairLanes - 1) / kPairLanes;  // of a row
constexpr std::int32_t kBlockTokens = 32;                                         // of P and V that one product takes
/// A LeanTile has up to 128 KB of K and V and a multiple of 16 tokens (select_tile()); all of that may be V, rounded up to whole blocks.
constexpr std::size_t kMaxValueTiles = (128 * 1024 + kTileRows * kMaxHeadDim * 2 + 1023) / 1024;

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

inline const std::uint16_t* token_row(const TokenRows& rows, std::int32_t token) noexcept {
  return reinterpret_cast<const std::uint16_t*>(rows.row(token));
}

inline bool whole_vectors(const TokenRows& rows) noexcept { return rows.dims % kPairLanes == 0; }

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

}  // namespace
}  // namespace lean::cpu

// A LeanTile of many rows, as prompts bring: it takes longer to compute than to read, so K and V are what the caches hold. K is
// turned, so that a vector of scores holds tokens and no lanes are to be added up; a few rows at a time meet all tokens, and their
// sums stay in registers. Included by lean_tile-inl.hpp; not a header that compiles alone.

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {

// ---- scores ---------------------------------------------------------------------------------------------------------

#if HWY_TARGET != HWY_SCALAR
constexpr std::int32_t kPanelTokens = 2 * kLanes;
constexpr std::int32_t kPanelDims = 128;  // 16 KB with the widest vectors

/// Keys turned: element [d][t] of a panel is dim d, in the order of order_query(), of its token t.
struct Panel {
  HWY_ALIGN float values[std::size_t{kPanelDims} * kPanelTokens];
  std::int32_t dims = 0;
};

/// Four tokens' vectors of dims [d, d + kLanes): 128 bits hold one dim of all four then.
HWY_INLINE void turn_four(const Vec* rows, Panel& panel, std::int32_t d, std::int32_t token) {
  const F32 f32;
  const hn::RebindToUnsigned<hn::Repartition<double, F32>> u64;
  const hn::Full128<float> f128;
  const auto ab_low = hn::BitCast(u64, hn::InterleaveLower(f32, rows[0], rows[1]));
  const auto ab_high = hn::BitCast(u64, hn::InterleaveUpper(f32, rows[0], rows[1]));
  const auto cd_low = hn::BitCast(u64, hn::InterleaveLower(f32, rows[2], rows[3]));
  const auto cd_high = hn::BitCast(u64, hn::InterleaveUpper(f32, rows[2], rows[3]));
  HWY_ALIGN float turned[std::size_t{4} * kLanes];
  hn::Store(hn::BitCast(f32, hn::InterleaveLower(u64, ab_low, cd_low)), f32, turned);
  hn::Store(hn::BitCast(f32, hn::InterleaveUpper(u64, ab_low, cd_low)), f32, turned + kLanes);
  hn::Store(hn::BitCast(f32, hn::InterleaveLower(u64, ab_high, cd_high)), f32, turned + 2 * kLanes);
  hn::Store(hn::BitCast(f32, hn::InterleaveUpper(u64, ab_high, cd_high)), f32, turned + 3 * kLanes);
  for (std::int32_t i = 0; i < kLanes; ++i)
    hn::Store(hn::Load(f128, turned + i % 4 * kLanes + i / 4 * 4), f128, panel.values + (d + i) * kPanelTokens + token);
}

/// The panel of dims [first, first + kPanelDims) of tokens from `token` on; those past the end repeat the last one.
template <typename T>
HWY_INLINE void turn(const TokenRows& k, std::int32_t token, std::int32_t first, const ReadAhead& ahead, Panel& panel) {
  panel.dims = std::min(kPanelDims, k.dims - first);
  for (std::int32_t t = 0; t < kPanelTokens; t += 4) {
    const StorageOf<T>* keys[4];
    for (int i = 0; i < 4; ++i) {
      const std::int32_t own = std::min(token + t + i, k.tokens - 1);
      keys[i] = token_row<T>(k, own) + first;
      if (first == 0 && own == token + t + i) ahead.ask_row(own);  // once for each token
    }
    Vec rows[4];
    std::int32_t d = 0;
    for (; Element<T>::kPairs && d + 2 * kLanes <= panel.dims; d += 2 * kLanes) {
      for (int i = 0; i < 4; ++i) rows[i] = load_of_pair<T, 0>(keys[i] + d);
      turn_four(rows, panel, d, t);
      for (int i = 0; i < 4; ++i) rows[i] = load_of_pair<T, 1>(keys[i] + d);
      turn_four(rows, panel, d + kLanes, t);
    }
    for (; d < panel.dims; d += kLanes) {
      for (int i = 0; i < 4; ++i)
        rows[i] = d + kLanes <= panel.dims ? Element<T>::load(keys[i] + d) : Element<T>::load_first(keys[i] + d, panel.dims - d);
      turn_four(rows, panel, d, t);
    }
  }
}

/// Scores of kRows rows with a panel, added to those of the dims before it.
template <int kRows>
HWY_INLINE void scores_panel(const QueryRows& q, std::int32_t row, const Panel& panel, std::int32_t first, const RowBuffer& s,
                             std::int32_t token) {
  const F32 f32;
  Vec acc[std::size_t{kRows} * 2];
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    LEAN_UNROLL for (int i = 0; i < 2; ++i) acc[r * 2 + i] =
        first == 0 ? hn::Zero(f32) : hn::Load(f32, s.row(row + r) + token + i * kLanes);
  }
  const float* queries = q.f32.row(row) + first;
  for (std::int32_t d = 0; d < panel.dims; ++d) {
    const Vec keys[2] = {hn::Load(f32, panel.values + d * kPanelTokens), hn::Load(f32, panel.values + d * kPanelTokens + kLanes)};
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec query = hn::Set(f32, queries[r * q.f32.stride + d]);
      LEAN_UNROLL for (int i = 0; i < 2; ++i) acc[r * 2 + i] = hn::MulAdd(query, keys[i], acc[r * 2 + i]);
    }
  }
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    LEAN_UNROLL for (int i = 0; i < 2; ++i) hn::Store(acc[r * 2 + i], f32, s.row(row + r) + token + i * kLanes);
  }
}

/// scores() of many rows: no lanes are to be added up, since each holds a token of its own; turning K costs as much as some rows.
template <typename T>
void scores_of_many(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& prefetch) noexcept {
  const ReadAhead ahead(k, sizeof(StorageOf<T>), prefetch);
  Panel panel;
  for (std::int32_t token = 0; token < k.tokens; token += kPanelTokens) {
    for (std::int32_t first = 0; first < k.dims; first += kPanelDims) {
      turn<T>(k, token, first, ahead, panel);
      std::int32_t row = 0;
      constexpr std::int32_t kRows = kManyRegisters ? 8 : 4;
      for (; row + kRows <= s.rows; row += kRows) scores_panel<kRows>(q, row, panel, first, s, token);
      for (; row + 2 <= s.rows; row += 2) scores_panel<2>(q, row, panel, first, s, token);
      if (row < s.rows) scores_panel<1>(q, row, panel, first, s, token);
    }
  }
}
#endif

// ---- accumulate -----------------------------------------------------------------------------------------------------

/// o = o rescale + the tile's sums, of kRows rows and kVectors vectors from dim `d` on. Registers hold the sums, which are added up
/// as add_tokens() does.
template <typename T, int kRows, int kVectors>
HWY_INLINE void accumulate_tile(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const TokenRows& v, std::int32_t d,
                                const float* rescale, const ReadAhead& ahead) {
  const F32 f32;
  Vec acc[std::size_t{kRows * kVectors}];
  LEAN_UNROLL for (int i = 0; i < kRows * kVectors; ++i) acc[i] = hn::Zero(f32);
  const float* weights = p.row(row);
  for (std::int32_t t = 0; t < v.tokens; ++t) {
    if (row == 0 && d == 0) ahead.ask_row(t);  // once for each token
    const StorageOf<T>* from = token_row<T>(v, t) + d;
    Vec value[std::size_t{kVectors}];
    if constexpr (kVectors == 1) {
      value[0] = d + kLanes <= v.dims ? Element<T>::load(from) : Element<T>::load_first(from, v.dims - d);
    } else {
      LEAN_UNROLL for (int i = 0; i < kVectors; i += 2) {
        value[i] = load_of_pair<T, 0>(from + i * kLanes);
        value[i + 1] = load_of_pair<T, 1>(from + i * kLanes);
      }
    }
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(f32, weights[r * p.stride + t]);
      LEAN_UNROLL for (int i = 0; i < kVectors; ++i) acc[r * kVectors + i] = hn::MulAdd(weight, value[i], acc[r * kVectors + i]);
    }
  }
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    const Vec factor = hn::Set(f32, rescale[row + r]);
    float* out = o.row(row + r) + d;
    LEAN_UNROLL for (int i = 0; i < kVectors; ++i)
        hn::Store(hn::MulAdd(hn::Load(f32, out + i * kLanes), factor, acc[r * kVectors + i]), f32, out + i * kLanes);
  }
}

template <typename T, int kRows>
HWY_INLINE void accumulate_tile_rows(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const TokenRows& v,
                                     const float* rescale, const ReadAhead& ahead) {
  std::int32_t d = 0;
  for (; kManyRegisters && d + 4 * kLanes <= v.dims; d += 4 * kLanes)
    accumulate_tile<T, kRows, kManyRegisters ? 4 : 2>(o, p, row, v, d, rescale, ahead);
  for (; d + 2 * kLanes <= v.dims; d += 2 * kLanes) accumulate_tile<T, kRows, 2>(o, p, row, v, d, rescale, ahead);
  for (; d < v.dims; d += kLanes) accumulate_tile<T, kRows, 1>(o, p, row, v, d, rescale, ahead);
}

/// accumulate() of many rows: some after the others, each time over the tile's V, which the caches hold. The same bits.
template <typename T>
HWY_INLINE void accumulate_many(const RowBuffer& o, const RowBuffer& p, const TokenRows& v, const float* rescale,
                                const ReadAhead& ahead) {
  constexpr std::int32_t kRows = kManyRegisters ? 6 : 4;
  std::int32_t row = 0;
  for (; row + kRows <= o.rows; row += kRows) accumulate_tile_rows<T, kRows>(o, p, row, v, rescale, ahead);
  for (; row + 2 <= o.rows; row += 2) accumulate_tile_rows<T, 2>(o, p, row, v, rescale, ahead);
  if (row < o.rows) accumulate_tile_rows<T, 1>(o, p, row, v, rescale, ahead);
}

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

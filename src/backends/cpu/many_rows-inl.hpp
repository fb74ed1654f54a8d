// A LeanTile of many rows, as prompts bring: it takes longer to compute than to read, so K and V are converted and laid out once for
// all rows of a block, as panels. A panel's lines are two vectors long: tokens of K, which is turned, so that no lanes are to be added
// up; dims of V. A few rows at a time meet a panel, and their sums stay in registers. Included by lean_tile-inl.hpp; not a header that
// compiles alone.

HWY_BEFORE_NAMESPACE();
namespace lean::cpu::HWY_NAMESPACE {
namespace {

// ---- panels ---------------------------------------------------------------------------------------------------------

constexpr std::int32_t kPanelLanes = 2 * kLanes;
static_assert(kTurnedMultiple % kPanelLanes == 0);

/// sums[r][i] = sum_j factors[r][j] panel[j][i], one j after the other; kRows rows, `stride` apart.
template <int kRows>
HWY_INLINE void multiply_panel(const float* factors, std::int32_t stride, const float* panel, std::int32_t lines, Vec (*sums)[2]) {
  const F32 f32;
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = hn::Zero(f32);
  for (std::int32_t j = 0; j < lines; ++j) {
    const Vec line[2] = {hn::Load(f32, panel + j * kPanelLanes), hn::Load(f32, panel + j * kPanelLanes + kLanes)};
    LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec factor = hn::Set(f32, factors[r * stride + j]);
      LEAN_UNROLL for (int i = 0; i < 2; ++i) sums[r][i] = hn::MulAdd(factor, line[i], sums[r][i]);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
/// Four tokens' vectors of dims [d, d + kLanes) into a panel of tokens: 128 bits hold one dim of all four then.
HWY_INLINE void turn_four(const Vec* rows, float* panel, std::int32_t d, std::int32_t token) {
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
    hn::Store(hn::Load(f128, turned + i % 4 * kLanes + i / 4 * 4), f128, panel + (d + i) * kPanelLanes + token);
}

/// K as panels of kPanelLanes tokens: line d of a panel is dim d, in the order of order_query(). Tokens past the end repeat the last one.
template <typename T>
HWY_INLINE void turn_keys(const TokenRows& k, const ReadAhead& ahead, float* panels) {
  const std::int32_t lines = (k.dims + kLanes - 1) / kLanes * kLanes;
  for (std::int32_t token = 0; token < k.tokens; token += kPanelLanes, panels += lines * kPanelLanes) {
    for (std::int32_t t = 0; t < kPanelLanes; t += 4) {
      const StorageOf<T>* keys[4];
      for (int i = 0; i < 4; ++i) {
        const std::int32_t own = std::min(token + t + i, k.tokens - 1);
        keys[i] = token_row<T>(k, own);
        if (own == token + t + i) ahead.ask_row(own);  // once for each token
      }
      Vec rows[4];
      std::int32_t d = 0;
      for (; Element<T>::kPairs && d + kPanelLanes <= k.dims; d += kPanelLanes) {
        for (int i = 0; i < 4; ++i) rows[i] = load_of_pair<T, 0>(keys[i] + d);
        turn_four(rows, panels, d, t);
        for (int i = 0; i < 4; ++i) rows[i] = load_of_pair<T, 1>(keys[i] + d);
        turn_four(rows, panels, d + kLanes, t);
      }
      for (; d < k.dims; d += kLanes) {
        for (int i = 0; i < 4; ++i)
          rows[i] = d + kLanes <= k.dims ? Element<T>::load(keys[i] + d) : Element<T>::load_first(keys[i] + d, k.dims - d);
        turn_four(rows, panels, d, t);
      }
    }
  }
}
#endif

/// A panel of V: line t is dims [d, d + kPanelLanes) of token t, as accumulate() reads them; zeros past the last dim.
template <typename T>
HWY_INLINE void lay_values(const TokenRows& v, std::int32_t d, const ReadAhead& ahead, float* panel) {
  const F32 f32;
  for (std::int32_t t = 0; t < v.tokens; ++t, panel += kPanelLanes) {
    if (d == 0) ahead.ask_row(t);  // once for each token
    const StorageOf<T>* from = token_row<T>(v, t) + d;
    const std::int32_t left = v.dims - d;
    if (left >= kPanelLanes) {
      hn::Store(load_of_pair<T, 0>(from), f32, panel);
      hn::Store(load_of_pair<T, 1>(from), f32, panel + kLanes);
    } else {
      hn::Store(left >= kLanes ? Element<T>::load(from) : Element<T>::load_first(from, left), f32, panel);
      hn::Store(left > kLanes ? Element<T>::load_first(from + kLanes, left - kLanes) : hn::Zero(f32), f32, panel + kLanes);
    }
  }
}

// ---- products -------------------------------------------------------------------------------------------------------

/// o = o rescale + the sums over a panel of V, of kRows rows from dim `d` on.
template <int kRows>
HWY_INLINE void accumulate_panel(const RowBuffer& o, const RowBuffer& p, std::int32_t row, const float* panel, std::int32_t tokens,
                                 std::int32_t d, std::int32_t dims, const float* rescale) {
  const F32 f32;
  Vec sums[std::size_t{kRows}][2];
  multiply_panel<kRows>(p.row(row), p.stride, panel, tokens, sums);
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    const Vec factor = hn::Set(f32, rescale[row + r]);
    float* out = o.row(row + r) + d;
    LEAN_UNROLL for (int i = 0; i < 2; ++i) {
      if (d + i * kLanes < dims) hn::Store(hn::MulAdd(hn::Load(f32, out + i * kLanes), factor, sums[r][i]), f32, out + i * kLanes);
    }
  }
}

/// f(std::integral_constant of how many, the first) for the rows whose sums are in registers together.
template <typename TF>
HWY_INLINE void for_rows(std::int32_t rows, const TF& f) {
  constexpr int kMost = kManyRegisters ? 8 : 4;
  std::int32_t row = 0;
  for (; row + kMost <= rows; row += kMost) f(std::integral_constant<int, kMost>(), row);
  for (; row + 2 <= rows; row += 2) f(std::integral_constant<int, 2>(), row);
  if (row < rows) f(std::integral_constant<int, 1>(), row);
}

HWY_INLINE void accumulate_panel_rows(const RowBuffer& o, const RowBuffer& p, const float* panel, std::int32_t tokens,
                                      std::int32_t d, std::int32_t dims, const float* rescale) {
  for_rows(o.rows,
           [&](auto count, std::int32_t row) HWY_ATTR { accumulate_panel<count()>(o, p, row, panel, tokens, d, dims, rescale); });
}

/// accumulate() of many rows: the same additions in the same order, so the same bits.
template <typename T>
HWY_INLINE void accumulate_many(const RowBuffer& o, const RowBuffer& p, const TokenRows& v, const float* rescale,
                                const ReadAhead& ahead) {
  HWY_ALIGN float panel[std::size_t{kMaxTileTokens} * kPanelLanes];
  for (std::int32_t d = 0; d < v.dims; d += kPanelLanes) {
    lay_values<T>(v, d, ahead, panel);
    accumulate_panel_rows(o, p, panel, v.tokens, d, v.dims, rescale);
  }
}

// ---- turned tiles ---------------------------------------------------------------------------------------------------

#if HWY_TARGET != HWY_SCALAR
void online_softmax(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows) noexcept;

/// Scores of kRows rows with a panel of K.
template <int kRows>
HWY_INLINE void scores_of_panel(const QueryRows& q, std::int32_t row, const float* panel, std::int32_t dims, const RowBuffer& s,
                                std::int32_t token) {
  Vec sums[std::size_t{kRows}][2];
  multiply_panel<kRows>(q.f32.row(row), q.f32.stride, panel, dims, sums);
  LEAN_UNROLL for (int r = 0; r < kRows; ++r) {
    LEAN_UNROLL for (int i = 0; i < 2; ++i) hn::Store(sums[r][i], F32(), s.row(row + r) + token + i * kLanes);
  }
}

constexpr std::int32_t kRowsTogether = 16;  // that go through all stages: their scores stay in the L1

void score(const TurnedRun& run) noexcept {
  const TurnedCall& call = run.call;
  const auto* panel = static_cast<const float*>(call.turned_k);
  const std::int32_t lines = (call.k.dims + kLanes - 1) / kLanes * kLanes;
  const QueryRows q{{call.q.f32.row(run.first), run.rows, call.q.f32.stride}};
  const RowBuffer s = run.s();
  for (std::int32_t token = 0; token < run.tokens; token += kPanelLanes, panel += lines * kPanelLanes) {
    for_rows(run.rows,
             [&](auto count, std::int32_t row) HWY_ATTR { scores_of_panel<count()>(q, row, panel, call.k.dims, s, token); });
  }
}

void weigh_and_add(const TurnedRun& run, bool is_scaled) noexcept {
  const TurnedCall& call = run.call;
  const SoftmaxRows softmax = call.softmax_of(run.first, is_scaled);
  online_softmax(run.s(), run.tokens, softmax);
  const auto* panel = static_cast<const float*>(call.turned_v);
  const RowBuffer o{call.o.row(run.first), run.rows, call.o.stride};
  for (std::int32_t d = 0; d < call.v.dims; d += kPanelLanes, panel += call.v.tokens * kPanelLanes) {
    accumulate_panel_rows(o, run.s(), panel, run.tokens, d, call.v.dims, softmax.rescale);
  }
}

template <typename T>
void lay_all_values(const TurnedCall& call) noexcept {
  const ReadAhead ahead(call.v, sizeof(StorageOf<T>), call.with_accumulate);
  auto* panel = static_cast<float*>(call.turned_v);
  for (std::int32_t d = 0; d < call.v.dims; d += kPanelLanes, panel += call.v.tokens * kPanelLanes) {
    lay_values<T>(call.v, d, ahead, panel);
  }
}

template <typename T>
void compute_turned(const TurnedCall& call) noexcept {
  turn_keys<T>(call.k, ReadAhead(call.k, sizeof(StorageOf<T>), call.with_scores), static_cast<float*>(call.turned_k));
  take_turned(call, kRowsTogether, [&] { lay_all_values<T>(call); }, score, weigh_and_add);
}

template <typename T>
constexpr TurnedTile kTurnedTile{
    .from_rows = kManyRows, .serves = [](std::int32_t) noexcept { return true; }, .compute = compute_turned<T>};
#endif

}  // namespace
}  // namespace lean::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

// TileKernels: the vector loops of a LeanTile on one instruction set, as a table of plain functions. The worker loop
// (worker.cpp) calls them; lean_tile-inl.hpp is their one source, compiled once per instruction set through Highway.
//
// Arithmetic contract, the same for every row whatever else is in its row block (batch invariance rests on it):
// a dot product adds its vectors in order into one accumulator and reduces its lanes in one fixed tree; a tile adds its tokens
// in order to a sum of its own, and O adds tiles in order; l adds lanes in order, tile by tile. Calls that do not promise it may
// take a TurnedTile that does not keep the order, where a dot product adds its dims one by one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/prefetch.hpp"
#include "backends/cpu/token_rows.hpp"
#include "lean/dtypes.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "softmax/state.hpp"

namespace lean::cpu {

/// Row strides of the private buffers are multiples of this many floats: a whole vector of any instruction set.
inline constexpr std::int32_t kLaneMultiple = 16;

/// Rows from which on K and V are looked at as what the caches hold: on one Zen 5 core, GFLOP/s of scores by lanes and of turned keys
/// were 155 and 150 with 16 rows, 166 and 185 with 32, 154 and 230 with 128 (tiles of 64 tokens of 128 fp32 dims).
inline constexpr std::int32_t kManyRows = 24;

/// Tokens of a LeanTile, at most.
inline constexpr std::int32_t kMaxTileTokens = 256;

/// Private buffers of one segment, fp32: rows x stride.
struct RowBuffer {
  float* data = nullptr;
  std::int32_t rows = 0;
  std::int32_t stride = 0;

  [[nodiscard]] float* row(std::int32_t r) const noexcept { return data + static_cast<std::int64_t>(r) * stride; }
};

/// Queries of a segment as scores wants them: fp32 after order_query(), and bf16 where the instruction set multiplies those.
struct QueryRows {
  RowBuffer f32;
  std::uint16_t* bf16 = nullptr;  // rows x f32.stride
};

struct SoftmaxRows {
  float scale = 0.0F;                     // log2-domain factor of a raw score
  const std::int32_t* visible = nullptr;  // tokens of this tile each row sees, [0, tokens]
  float* m = nullptr;
  float* l = nullptr;
  float* rescale = nullptr;    // out: exp2(m_old - m_new), to be applied to O
  RowsAhead* ahead = nullptr;  // a step each row

  /// Row r's largest score so far and `found`, its tile's; NaN if that is.
  [[nodiscard]] float larger(std::int32_t r, float found) const noexcept { return found > m[r] || found != found ? found : m[r]; }
  /// Nothing was seen yet: weights are 0, and O and l stay what they are.
  void take_nothing(std::int32_t r) const noexcept { rescale[r] = 1.0F; }
  /// Takes a tile's weights, which refer to `m_new` and whose sum is `added`. A NaN among them is in their sum, and is put into m.
  void take(std::int32_t r, float m_new, float added) const noexcept {
    rescale[r] = m_new == m[r] ? 1.0F : softmax::rescale_factor(m[r], m_new);
    l[r] = l[r] * rescale[r] + added;
    m[r] = added == added ? m_new : added;
  }
};

/// What becomes of one row's scores of a tile before the softmax, in this order: softcap, ALiBi, mask, window.
struct ScoreRule {
  float scale = 0.0F;           // of a raw score, into the log2 domain
  float cap = 0.0F;             // softcap, log2 domain; 0: none
  float slope = 0.0F;           // ALiBi, log2 domain: what a key loses per token of distance
  std::int32_t distance = 0;    // position of the tile's first key less the query's
  const float* bias = nullptr;  // log2 domain, [tokens]: added; -inf hides a key whatever its score. Null: none
  std::int32_t seen_begin = 0;  // tokens of the tile before it are hidden
};

inline constexpr int kKvTypes = kDTypeCount;
inline constexpr int kOutputTypes = kQueryDTypeCount;

/// Turned K and V are padded to multiples of this many tokens and dims.
inline constexpr std::int32_t kTurnedMultiple = 32;

/// A tile and a block's rows, for TurnedTile.
struct TurnedCall {
  QueryRows q;
  TokenRows k;
  const TokenRows& v;        // rules that mask replace what it says
  void* turned_k = nullptr;  // room for K and V in fp32, padded
  void* turned_v = nullptr;
  RowBuffer s;  // this and sums are scratch
  RowBuffer sums;
  RowBuffer o;
  SoftmaxRows softmax;  // visible[r] also says how many of the tile's tokens need be computed for a row
  Prefetch with_scores{};
  Prefetch with_accumulate{};
  /// Score rules of rows from `first` on, whose scores `s` are: true where they made log2-domain scores of them.
  bool (*apply_rules)(const void* context, std::int32_t first, const RowBuffer& s) noexcept = nullptr;
  const void* context = nullptr;
  bool masks = false;  // the rules hide tokens of V that no row sees: they take all rows before V is read

  /// Puts rows from `first` on, whose scores `rows` are, under the rules; whether these have scaled them.
  [[nodiscard]] bool rule(std::int32_t first, const RowBuffer& rows) const noexcept {
    return apply_rules != nullptr && apply_rules(context, first, rows);
  }
  [[nodiscard]] SoftmaxRows softmax_of(std::int32_t first, bool is_scaled) const noexcept {
    return {is_scaled ? 1.0F : softmax.scale, softmax.visible + first, softmax.m + first, softmax.l + first,
            softmax.rescale + first};
  }
  /// Of the tile's tokens, those before the last that one of these rows sees.
  [[nodiscard]] std::int32_t tokens_of(std::int32_t first, std::int32_t rows) const noexcept {
    return *std::max_element(softmax.visible + first, softmax.visible + first + rows);
  }
};

/// Rows of a block that go through the stages together, and those of the tile's tokens that they see.
struct TurnedRun {
  const TurnedCall& call;
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::int32_t tokens = 0;

  TurnedRun(const TurnedCall& of_call, std::int32_t first_row, std::int32_t most_rows) noexcept
      : call(of_call),
        first(first_row),
        rows(std::min(most_rows, of_call.s.rows - first_row)),
        tokens(of_call.tokens_of(first, rows)) {}

  [[nodiscard]] RowBuffer s() const noexcept { return {call.s.row(first), rows, call.s.stride}; }
};

/// The stages one after the other, so many rows at a time; score(run) and weigh_and_add(run, whether its rules have scaled it). V is
/// laid out behind the rules that mask.
template <typename TLayValues, typename TScore, typename TWeighAndAdd>
void take_turned(const TurnedCall& call, std::int32_t rows_together, const TLayValues& lay_values, const TScore& score,
                 const TWeighAndAdd& weigh_and_add) noexcept {
  const auto for_runs = [&](const auto& f) {
    for (std::int32_t first = 0; first < call.s.rows; first += rows_together) {
      if (const TurnedRun run(call, first, rows_together); run.tokens > 0) f(run);
    }
  };
  if (!call.masks) {
    lay_values();
    for_runs([&](const TurnedRun& run) {
      score(run);
      weigh_and_add(run, call.rule(run.first, run.s()));
    });
    return;
  }
  for_runs(score);
  const bool are_scaled = call.rule(0, call.s);
  lay_values();
  for_runs([&](const TurnedRun& run) { weigh_and_add(run, are_scaled); });
}

/// A tile whose K and V are laid out anew, once for all rows of a block. These then take its stages a few at a time, so that what lies
/// between two stages stays in the L1, and only with tokens that one of them sees.
struct TurnedTile {
  std::int32_t from_rows = 0;  // of a block: as many pay for it
  bool keeps_order = false;    // the same bits as by the stages of TileKernels
  /// True where rows of that many dims can be.
  bool (*serves)(std::int32_t dims) noexcept;
  /// All stages. A block's buffers are as long as select_tile() says, and rows past the call's last are scratch too, but in o.
  void (*compute)(const TurnedCall& call) noexcept;
};

struct TileKernels {
  const char* name;
  /// scores, online_softmax and accumulate each take a share of Prefetch::ahead. Else they read row by row, with ReadAhead.
  bool asks_ahead = false;
  /// Puts one fp32 query row in the order in which scores reads keys of that type; dims as in K.
  void (*order_query[kKvTypes])(float* row, std::int32_t dims) noexcept;
  /// s[r][t] = sum_d q[r][d] k[t][d], for all rows and tokens; s is padded to whole vectors.
  void (*scores[kKvTypes])(const QueryRows& q, const TokenRows& k, const RowBuffer& s, const Prefetch& prefetch) noexcept;
  /// Makes log2-domain scores of a row's raw ones by the rule; online_softmax then takes them with scale 1.
  void (*apply_rule)(float* s, std::int32_t tokens, const ScoreRule& rule) noexcept;
  /// Online softmax of one tile: masks, updates m and l, turns s into p = exp2(scale s - m) with 0 for unseen tokens.
  void (*online_softmax)(const RowBuffer& s, std::int32_t tokens, const SoftmaxRows& rows) noexcept;
  /// o[r] = o[r] rescale[r] + sum_t p[r][t] v[t], the sum by itself first: o's roundings are as many as tiles, not tokens. `sums`
  /// is room for it, rows as of o. Rows of o stay in an order of the kernel's until restore_values().
  void (*accumulate[kKvTypes])(const RowBuffer& o, const RowBuffer& sums, const RowBuffer& p, const TokenRows& v,
                               const float* rescale, const Prefetch& prefetch) noexcept;
  /// Puts a row of o in order after the last accumulate of that type; dims as in V.
  void (*restore_values[kKvTypes])(float* row, std::int32_t dims) noexcept;
  /// out[i] = float(in[i]).
  void (*load_row[kKvTypes])(const void* in, float* out, std::int32_t dims) noexcept;
  /// out[i] = T(in[i] scale), rounded to nearest even.
  void (*store_row[kOutputTypes])(const float* in, float scale, void* out, std::int32_t dims) noexcept;
  /// out[i] = fma(x[i], factor, addend[i]); out may be x or addend, and all are padded to whole vectors. Every merge is made of it.
  void (*add_scaled)(const float* addend, const float* x, float factor, float* out, std::int32_t dims) noexcept;
  /// Of K and V of that type; null: there is no such layout.
  const TurnedTile* turned[kKvTypes] = {};
};

/// Index into the tables above.
[[nodiscard]] constexpr int table_index(DType dtype) noexcept { return static_cast<int>(dtype); }

/// The instruction set that computes a call: options.cpu_isa, or for kBest the fastest. In chunks it does not depend on n_q, as
/// bits of a sequence must not.
[[nodiscard]] CpuIsa isa_of(const Options& options, const Problem& problem) noexcept;

/// The table of an available instruction set; for kBest that of best_cpu_isa().
[[nodiscard]] const TileKernels& kernels_for(CpuIsa isa) noexcept;

/// A row's bits do not depend on the rows beside it, nor on how many query tokens there are.
[[nodiscard]] bool in_chunks(const Options& options) noexcept;

/// By what blocks of that many rows take their tiles turned; null: they do not. In chunks none that does not keep the order.
[[nodiscard]] const TurnedTile* turned_tile_of(const Options& options, const Problem& problem, std::int32_t q_rows) noexcept;

/// How far ahead of the arithmetic this machine's rows are best asked for (docs/cpu-backend.md, "Reading ahead").
[[nodiscard]] std::int32_t read_ahead_bytes() noexcept;

/// True where probabilities are rounded to bf16 before they meet V (AVX-512-BF16, AMX): what the error bound must know.
[[nodiscard]] bool rounds_probabilities(const Options& options, const Problem& problem) noexcept;

}  // namespace lean::cpu

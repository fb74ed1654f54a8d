// Case: one call of the library as one line of text, "dtype=bf16,hq=8,hkv=2,lens=37+101,k=shd~gap3,in=peaks,workers=5".
// Everything a conformance test varies is a field; what is left out has the default below. A failing test prints its
// line, and conformance_tests --case=LINE --seed=N runs it again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "support/guarded_buffer.hpp"

namespace lean::support {

/// What q, k and v hold (inputs.hpp).
enum class Input : std::int32_t { kNormal, kPeaks, kAscending, kDescending, kEqual, kUniform, kOneHot, kSignature, kFlat };

/// What K and V are: of the queries' type, or fp8.
enum class KvType : std::int32_t { kAsQueries, kE4M3, kE5M2 };

/// Scales of fp8 K/V.
enum class KvScales : std::int32_t { kNone, kTensor, kHead };

/// Scores::mask: none, bytes, or numbers of a type.
enum class Mask : std::int32_t { kNone, kBoolean, kFloat32, kFloat16, kBFloat16 };

/// What memory holds that no row may see, and what scratch memory holds before a call.
enum class Fill : std::int32_t { kNan, kZero, kInfinity };

enum class ExecutorKind : std::int32_t { kDefault, kPool, kPermuted, kDelayed, kAscending, kDescending };

struct Case {
  // The problem. Layout names as in layout.hpp; where q (k) is packed, o and lse (v) lose their b too.
  DType dtype = DType::kBFloat16;
  KvType kv_type = KvType::kAsQueries;
  KvScales kv_scales = KvScales::kNone;
  std::int32_t q_heads = 4;
  std::int32_t kv_heads = 2;
  std::int32_t head_dim = 64;
  std::int32_t value_dim = 0;
  bool values_in_keys = false;         // V is the first value_dim dims of K, in the same memory; v's layout is not asked
  std::vector<std::int32_t> lens{37};  // key/value tokens of each sequence, left padding included
  std::vector<std::int32_t> n_q{1};    // query tokens, taken in turn; a q layout with b uses the first for all
  std::vector<std::int32_t> pad{};     // left padding of each sequence; empty: none
  std::int32_t page_tokens = 0;        // paged K/V: b of its layouts is the page, s the token in the page; 0: not paged
  bool csr = false;                    // pages by indptr and indices, else by a block table
  std::int32_t capacity = 0;           // 0: the longest length; packed K/V: every sequence gets this many tokens more
  bool lengths = true;                 // false: no kv_lengths; every sequence has the capacity
  bool causal = false;
  float scale = 0.0F;
  bool append = false;                 // the last n_q tokens of every sequence are new
  std::string append_layout = "bshd";  // where q is packed it loses its b
  std::int32_t rotary_dim = 0;
  bool rotary_interleaved = false;
  bool rotary_absolute = false;
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float softcap = 0.0F;
  bool alibi = false;
  bool alibi_per_sequence = false;
  bool sinks = false;
  Mask mask = Mask::kNone;
  std::string mask_layout = "bhsd";  // s: query tokens, d: keys
  bool tree = false;
  bool lse = true;
  std::string q_layout = "bshd";
  std::string k_layout = "bshd";
  std::string v_layout = "bhsd~gap8";
  std::string o_layout = "bhsd";
  std::string lse_layout = "bhsd";

  // The data.
  Input input = Input::kSignature;
  float q_std = 1.0F;
  std::vector<std::int32_t> ids{};  // whose data a sequence has; empty: its index
  Fill fill = Fill::kNan;
  Guard guard = Guard::kCanary;  // of the inputs; outputs have canaries
  std::uint64_t seed = 1;

  // How it is carried out.
  Policy policy{};
  Fixup fixup = Fixup::kLastArriver;
  Determinism determinism = Determinism::kRunToRun;
  std::int32_t workers = 3;
  CpuIsa isa = CpuIsa::kBest;
  ExecutorKind executor = ExecutorKind::kPool;
  Fill scratch = Fill::kNan;

  [[nodiscard]] std::int64_t batch() const { return static_cast<std::int64_t>(lens.size()); }
};

/// The fields that differ from the default, and the seed.
[[nodiscard]] std::string to_text(const Case& c);

/// "--case=... --seed=...": what to give conformance_tests.
[[nodiscard]] std::string reproducer(const Case& c);

/// Nothing, with a word in `error`, when the line does not say a case.
[[nodiscard]] std::optional<Case> parse_case(const std::string& text, std::string& error);

}  // namespace lean::support

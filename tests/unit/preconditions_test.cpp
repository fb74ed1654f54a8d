// Every precondition of a Problem: each row of the table has a breaker here that breaks it and nothing before it, each
// breaker a row, and each refusal names the argument, the value seen and what is allowed.
#include "problem/preconditions.hpp"

#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "precondition_checks.hpp"

namespace lean {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 62;
constexpr std::int32_t kInts[] = {0, 1};
constexpr float kFloats[] = {0.0F};
constexpr std::uint32_t kBits[] = {0};

/// One of everything that has an address; never read.
alignas(16) std::byte memory[8][64];

/// Two sequences of two query tokens, four query and two kv heads.
Problem valid() {
  Problem p{.batch = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64, .q_tokens = 2};
  p.q = {.data = memory[0], .dtype = DType::kFloat16, .strides = {512, 64, 256, 1}};
  p.k = {.data = memory[1], .dtype = DType::kFloat16, .strides = {1000, 500, 5, 1}};
  p.v = {.data = memory[2], .dtype = DType::kFloat16, .strides = {1000, 500, 5, 1}};
  p.o = {.data = memory[3], .dtype = DType::kFloat16, .strides = {512, 64, 256, 1}};
  p.lse = {.data = reinterpret_cast<float*>(memory[4]), .sequence_stride = 8, .head_stride = 2, .token_stride = 1};
  p.kv_capacity = 100;
  return p;
}

void make_paged(Problem& p) {
  p.pages = {.page_tokens = 16, .page_count = 10, .block_table = kInts, .block_table_stride = 7};
  p.kv_lengths = kInts;
}

void make_listed(Problem& p) { p.pages = {.page_tokens = 16, .page_count = 10, .page_indptr = kInts, .page_indices = kInts}; }

void make_appending(Problem& p) {
  p.kv_lengths = kInts;
  p.append = {.k = p.q, .v = p.q, .rotary_cos = kFloats, .rotary_sin = kFloats, .rotary_dim = 2};
  p.append.k.data = memory[5];
  p.append.v.data = memory[6];
}

void make_packed(Problem& p) {
  p.cu_q_tokens = kInts;
  p.total_q_tokens = 4;
  p.cu_kv_tokens = kInts;
  p.total_kv_tokens = 200;
  p.lse.head_stride = 4;
}

/// Few rows, and 2^46 by what a sequence may have.
void make_most_rows(Problem& p) {
  make_packed(p);
  p.q_heads = p.kv_heads = 1;
  p.batch = 1 << 16;
  p.q_tokens = 1 << 30;
}

void* off_by(std::size_t bytes, void* data) { return static_cast<std::byte*>(data) + bytes; }
const void* off_by(std::size_t bytes, const void* data) { return static_cast<const std::byte*>(data) + bytes; }

template <typename T>
const T* off_by_one_byte(const T* data) {
  return static_cast<const T*>(off_by(1, data));
}

using Breaker = support::Breaker<Problem>;

const std::vector<Breaker>& breakers() {
  static const std::vector<Breaker> kBreakers = {
      {"batch", "allowed 0 to", [](Problem& p) { p.batch = -1; }},
      {"batch", "allowed 0 to", [](Problem& p) { p.batch = std::int64_t{INT32_MAX} + 1; }},
      {"q_heads", "allowed 1", [](Problem& p) { p.q_heads = 0; }},
      {"q_heads", "allowed 1", [](Problem& p) { p.q_heads = INT32_MIN; }},
      {"kv_heads", "allowed 1", [](Problem& p) { p.kv_heads = 0; }},
      {"kv_heads", "allowed 1", [](Problem& p) { p.kv_heads = -2; }},
      {"q_heads", "multiple of kv_heads", [](Problem& p) { p.q_heads = 3; }},
      {"q_heads", "multiple of kv_heads", [](Problem& p) { p.kv_heads = 8; }},
      {"head_dim", "1 to 576", [](Problem& p) { p.head_dim = 0; }},
      {"head_dim", "1 to 576", [](Problem& p) { p.head_dim = kMaxHeadDim + 1; }},
      {"value_dim", "1 to 576", [](Problem& p) { p.value_dim = -1; }},
      {"value_dim", "1 to 576", [](Problem& p) { p.value_dim = kMaxHeadDim + 1; }},
      {"q_tokens", "1 or more", [](Problem& p) { p.q_tokens = 0; }},
      {"total_q_tokens", "with cu_q_tokens", [](Problem& p) { p.total_q_tokens = 1; }},
      {"total_q_tokens", "with cu_q_tokens",
       [](Problem& p) {
         make_packed(p);
         p.total_q_tokens = -1;
       }},
      {"total_q_tokens", "with cu_q_tokens",
       [](Problem& p) {
         make_packed(p);
         p.total_q_tokens = std::int64_t{INT32_MAX} + 1;
       }},
      {"kv_capacity", "0 or more", [](Problem& p) { p.kv_capacity = -1; }},
      {"kv_capacity", "1 or more", [](Problem& p) { p.kv_capacity = 0; }},
      {"kv_capacity", "1 or more", [](Problem& p) { p.kv_capacity = 0, p.k.data = nullptr; }},
      {"total_kv_tokens", "with cu_kv_tokens", [](Problem& p) { p.total_kv_tokens = 7; }},
      {"total_kv_tokens", "with cu_kv_tokens",
       [](Problem& p) {
         make_packed(p);
         p.total_kv_tokens = -1;
       }},
      {"q.dtype", "float32, float16, bfloat16", [](Problem& p) { p.q.dtype = static_cast<DType>(5); }},
      {"q.dtype", "float32, float16, bfloat16", [](Problem& p) { p.q.dtype = DType::kFloat8E4M3; }},
      {"q.dtype", "float32, float16, bfloat16", [](Problem& p) { p.q.dtype = static_cast<DType>(-1); }},
      {"o.dtype", "equal q.dtype", [](Problem& p) { p.o.dtype = DType::kFloat32; }},
      {"k.dtype", "equal q.dtype", [](Problem& p) { p.k.dtype = DType::kBFloat16; }},
      {"k.dtype", "equal q.dtype", [](Problem& p) { p.k.dtype = static_cast<DType>(99); }},
      {"v.dtype", "equal k.dtype", [](Problem& p) { p.v.dtype = DType::kFloat8E4M3; }},
      {"q.data", "not be null", [](Problem& p) { p.q.data = nullptr; }},
      {"o.data", "not be null", [](Problem& p) { p.o.data = nullptr; }},
      {"k.data", "not be null", [](Problem& p) { p.k.data = nullptr; }},
      {"v.data", "not be null", [](Problem& p) { p.v.data = nullptr; }},
      {"q.data", "aligned", [](Problem& p) { p.q.data = off_by(1, p.q.data); }},
      {"k.data", "aligned", [](Problem& p) { p.k.data = off_by(1, p.k.data); }},
      {"v.data", "aligned", [](Problem& p) { p.v.data = off_by(1, p.v.data); }},
      {"o.data", "aligned", [](Problem& p) { p.o.data = off_by(1, p.o.data); }},
      {"lse.data", "aligned", [](Problem& p) { p.lse.data = static_cast<float*>(off_by(2, p.lse.data)); }},
      {"cu_q_tokens", "aligned", [](Problem& p) { make_packed(p), p.cu_q_tokens = off_by_one_byte(kInts); }},
      {"cu_kv_tokens", "aligned", [](Problem& p) { make_packed(p), p.cu_kv_tokens = off_by_one_byte(kInts); }},
      {"kv_lengths", "aligned", [](Problem& p) { p.kv_lengths = static_cast<const std::int32_t*>(off_by(2, kInts)); }},
      {"kv_left_pad", "aligned", [](Problem& p) { p.kv_left_pad = off_by_one_byte(kInts); }},
      {"o.data", "not be q.data", [](Problem& p) { p.o.data = memory[0]; }},
      {"o.data", "k.data or v.data", [](Problem& p) { p.o.data = memory[1]; }},
      {"o.data", "k.data or v.data", [](Problem& p) { p.o.data = memory[2]; }},
      {"o.data", "nor append's", [](Problem& p) { make_appending(p), p.o.data = memory[5]; }},
      {"o.data", "nor append's", [](Problem& p) { make_appending(p), p.o.data = memory[6]; }},
      {"lse.data", "nor append's", [](Problem& p) { make_appending(p), p.lse.data = reinterpret_cast<float*>(memory[5]); }},
      {"lse.data", "nor append's", [](Problem& p) { make_appending(p), p.lse.data = reinterpret_cast<float*>(memory[6]); }},
      {"lse.data", "not be o.data", [](Problem& p) { p.lse.data = static_cast<float*>(p.o.data); }},
      {"lse.data", "not be o.data", [](Problem& p) { p.lse.data = reinterpret_cast<float*>(memory[0]); }},
      {"lse.data", "not be o.data", [](Problem& p) { p.lse.data = reinterpret_cast<float*>(memory[1]); }},
      {"lse.data", "not be o.data", [](Problem& p) { p.lse.data = reinterpret_cast<float*>(memory[2]); }},
      {"q.strides", "63 bits", [](Problem& p) { p.q.strides.token = kHuge; }},
      {"q.strides", "63 bits", [](Problem& p) { p.q.strides.dim = -kHuge; }},
      {"o.strides", "63 bits", [](Problem& p) { p.o.strides.sequence = kHuge; }},
      {"k.strides", "63 bits", [](Problem& p) { p.k.strides.head = INT64_MIN; }},
      {"k.strides", "63 bits", [](Problem& p) { p.batch = 1, p.k.strides.sequence = INT64_MAX; }},  // of an axis of one element
      {"k.strides", "63 bits",
       [](Problem& p) {
         make_packed(p);
         p.k.strides.token = kHuge / 100;
       }},
      {"v.strides", "63 bits", [](Problem& p) { p.v.strides.token = kHuge / 50; }},
      {"v.strides", "63 bits",
       [](Problem& p) {
         make_paged(p);
         p.v.strides.sequence = kHuge / 8;  // from page to page
       }},
      {"lse.token_stride", "63 bits", [](Problem& p) { p.lse.token_stride = kHuge; }},
      {"o.strides", "no stride may be 0", [](Problem& p) { p.o.strides.sequence = 0; }},
      {"o.strides", "no stride may be 0", [](Problem& p) { p.o.strides.head = 0; }},
      {"o.strides", "no stride may be 0", [](Problem& p) { p.o.strides.token = 0; }},
      {"o.strides", "no stride may be 0", [](Problem& p) { p.o.strides.dim = 0; }},
      {"lse.token_stride", "no stride may be 0", [](Problem& p) { p.lse.head_stride = 0; }},
      {"batch x q_heads x q_tokens x kv_capacity", "2^46",
       [](Problem& p) {
         p.batch = INT32_MAX;
         p.q_heads = 1 << 14;
         p.kv_capacity = INT32_MAX;
       }},
      {"batch x q_heads x q_tokens x kv_capacity", "2^46",
       [](Problem& p) {
         p.batch = p.q_tokens = p.kv_capacity = INT32_MAX;  // leaves 64 bits
         p.q_heads = 1 << 30;
       }},
      {"q_tokens x q_heads / kv_heads", "rows of a kv head",
       [](Problem& p) {
         p.batch = 1;
         p.q_tokens = 1 << 30;  // times two query heads a kv head
       }},
      {"q_tokens x q_heads / kv_heads", "rows of a kv head",
       [](Problem& p) {
         make_packed(p);
         p.total_q_tokens = p.q_tokens = 1 << 30;
         p.lse.head_stride = 1 << 30;
       }},
      {"batch x q_heads x q_tokens", "2^46 rows",
       [](Problem& p) {
         make_most_rows(p);
         ++p.q_tokens;
       }},
      {"batch x q_heads x q_tokens", "2^46 rows",
       [](Problem& p) {
         make_packed(p);
         p.batch = p.q_tokens = INT32_MAX;
         p.q_heads = p.kv_heads = 1 << 10;  // leaves 64 bits
       }},
      {"batch x q_heads x q_tokens", "63 bits",
       [](Problem& p) {
         make_most_rows(p);
         p.kv_capacity = 1 << 17;
       }},
      {"o.strides", "no two axes may meet", [](Problem& p) { p.o.strides.head = p.o.strides.dim; }},
      {"o.strides", "no two axes may meet", [](Problem& p) { p.o.strides.token = -p.o.strides.head; }},
      {"lse.token_stride", "no two axes may meet", [](Problem& p) { p.lse.sequence_stride = p.lse.head_stride; }},
      {"scores.scale", "finite", [](Problem& p) { p.scores.scale = INFINITY; }},
      {"scores.scale", "finite", [](Problem& p) { p.scores.scale = NAN; }},
      {"scores.scale", "-1e38 to 1e38", [](Problem& p) { p.scores.scale = 2e38F; }},
      {"scores.scale", "-1e38 to 1e38", [](Problem& p) { p.scores.scale = -3e38F; }},
      {"scores.scale", "1e-37 or more", [](Problem& p) { p.scores.scale = 1e-40F; }},
      {"scores.scale", "1e-37 or more", [](Problem& p) { p.scores.scale = -1e-45F; }},
      {"scores.softcap", "1e-30 to 1e30", [](Problem& p) { p.scores.softcap = -0.5F; }},
      {"scores.softcap", "1e-30 to 1e30", [](Problem& p) { p.scores.softcap = NAN; }},
      {"scores.softcap", "1e-30 to 1e30", [](Problem& p) { p.scores.softcap = INFINITY; }},
      {"scores.softcap", "1e-30 to 1e30", [](Problem& p) { p.scores.softcap = 2.37e38F; }},
      {"scores.softcap", "1e-30 to 1e30", [](Problem& p) { p.scores.softcap = 1e-40F; }},
      {"scores.window_left", "-1 (all)", [](Problem& p) { p.scores.window_left = -2; }},
      {"scores.window_right", "-1 (all)", [](Problem& p) { p.scores.window_right = INT32_MIN; }},
      {"scores.alibi_slopes", "aligned", [](Problem& p) { p.scores.alibi_slopes = off_by_one_byte(kFloats); }},
      {"scores.alibi_sequence_stride", "0 or more",
       [](Problem& p) { p.scores.alibi_slopes = kFloats, p.scores.alibi_sequence_stride = -1; }},
      {"scores.alibi_sequence_stride", "63 bits",
       [](Problem& p) { p.scores.alibi_slopes = kFloats, p.scores.alibi_sequence_stride = kHuge; }},
      {"scores.sinks", "aligned", [](Problem& p) { p.scores.sinks = off_by_one_byte(kFloats); }},
      {"scores.mask_dtype", "additive mask",
       [](Problem& p) {
         p.scores.mask = kFloats;
         p.scores.mask_dtype = DType::kFloat8E5M2;
       }},
      {"scores.mask_dtype", "additive mask",
       [](Problem& p) {
         p.scores.mask = kFloats;
         p.scores.mask_dtype = static_cast<DType>(7);
       }},
      {"scores.mask", "aligned",
       [](Problem& p) {
         p.scores.mask = off_by(1, kFloats);
         p.scores.mask_dtype = DType::kBFloat16;
       }},
      {"scores.mask_strides", "63 bits",
       [](Problem& p) {
         p.scores.mask = kFloats;
         p.scores.mask_strides.dim = kHuge;
       }},
      {"scores.tree_mask", "aligned", [](Problem& p) { p.scores.tree_mask = off_by_one_byte(kBits); }},
      {"pages.page_tokens", "0 (not paged)", [](Problem& p) { p.pages.page_tokens = -1; }},
      {"cu_kv_tokens", "null with paged",
       [](Problem& p) {
         make_paged(p);
         p.cu_kv_tokens = kInts;
       }},
      {"pages.block_table", "exactly one",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table = nullptr;
       }},
      {"pages.block_table", "exactly one",
       [](Problem& p) {
         make_paged(p);
         p.pages.page_indptr = p.pages.page_indices = kInts;
       }},
      {"pages.block_table", "exactly one",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table = nullptr;
         p.pages.page_indices = kInts;
       }},
      {"pages.block_table", "aligned", [](Problem& p) { make_paged(p), p.pages.block_table = off_by_one_byte(kInts); }},
      {"pages.page_indptr", "aligned", [](Problem& p) { make_listed(p), p.pages.page_indptr = off_by_one_byte(kInts); }},
      {"pages.page_indices", "aligned", [](Problem& p) { make_listed(p), p.pages.page_indices = off_by_one_byte(kInts); }},
      {"pages.page_count", "1 to 2147483647",
       [](Problem& p) {
         make_paged(p);
         p.pages.page_count = 0;
       }},
      {"pages.block_table_stride", "0 or more",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table_stride = -1;
       }},
      {"pages.block_table_stride", "several sequences",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table_stride = 0;
       }},
      {"kv_capacity", "fewer pages",
       [](Problem& p) {
         make_paged(p);  // 7 pages of 16 tokens
         p.kv_capacity = 113;
       }},
      {"kv_capacity", "fewer pages",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table_stride = 1;
       }},
      {"kv_lengths", "with pages.block_table",
       [](Problem& p) {
         make_paged(p);
         p.kv_lengths = nullptr;
       }},
      {"kv_lengths", "with append",
       [](Problem& p) {
         make_appending(p);
         p.kv_lengths = nullptr;
       }},
      {"pages.block_table_stride", "63 bits",
       [](Problem& p) {
         make_paged(p);
         p.pages.block_table_stride = kHuge;
       }},
      {"append.v.data", "both be given", [](Problem& p) { p.append.k.data = memory[5]; }},
      {"append.v.data", "both be given", [](Problem& p) { p.append.v.data = memory[5]; }},
      {"append.cached_lengths", "nothing is appended",
       [](Problem& p) {
         make_appending(p);
         p.append = {.cached_lengths = kInts + 1};
       }},
      {"append.cached_lengths", "aligned",
       [](Problem& p) {
         make_appending(p);
         p.append.cached_lengths = off_by_one_byte(kInts);
       }},
      {"append.cached_lengths", "another array",
       [](Problem& p) {
         make_appending(p);
         p.append.cached_lengths = p.kv_lengths;
       }},
      {"append.cached_lengths", "another array",
       [](Problem& p) {
         make_appending(p);
         p.append.cached_lengths = p.kv_lengths + p.batch - 1;
       }},
      {"append.k.dtype", "equal q.dtype",
       [](Problem& p) {
         make_appending(p);
         p.append.k.dtype = DType::kFloat32;
       }},
      {"append.v.dtype", "equal q.dtype",
       [](Problem& p) {
         make_appending(p);
         p.append.v.dtype = DType::kBFloat16;
       }},
      {"append.k.data", "aligned",
       [](Problem& p) {
         make_appending(p);
         p.append.k.data = off_by(1, p.append.k.data);
       }},
      {"append.v.data", "aligned",
       [](Problem& p) {
         make_appending(p);
         p.append.v.data = off_by(1, p.append.v.data);
       }},
      {"append.k.strides", "63 bits",
       [](Problem& p) {
         make_appending(p);
         p.append.k.strides.head = kHuge;
       }},
      {"append.v.strides", "63 bits",
       [](Problem& p) {
         make_appending(p);
         p.append.v.strides.dim = kHuge;
       }},
      {"k.strides", "no stride may be 0",
       [](Problem& p) {
         make_appending(p);
         p.k.strides.head = 0;
       }},
      {"v.strides", "no stride may be 0",
       [](Problem& p) {
         make_appending(p);
         p.v.strides.token = 0;
       }},
      {"v.data", "not be k.data",
       [](Problem& p) {
         make_appending(p);
         p.v.data = p.k.data;
       }},
      {"append.rotary_dim", "even number", [](Problem& p) { p.append.rotary_dim = -2; }},
      {"append.rotary_dim", "even number", [](Problem& p) { p.append.rotary_dim = 3; }},
      {"append.rotary_dim", "even number", [](Problem& p) { p.append.rotary_dim = 66; }},
      {"append.rotary_cos", "rotary_dim > 0", [](Problem& p) { p.append.rotary_dim = 64; }},
      {"append.rotary_cos", "rotary_dim > 0",
       [](Problem& p) {
         p.append.rotary_dim = 64;
         p.append.rotary_cos = kFloats;
       }},
      {"append.rotary_dim", "nothing is appended",
       [](Problem& p) { p.append = {.rotary_cos = kFloats, .rotary_sin = kFloats, .rotary_dim = 2}; }},
      {"append.rotary_cos", "aligned",
       [](Problem& p) {
         make_appending(p);
         p.append.rotary_cos = off_by_one_byte(kFloats);
       }},
      {"append.rotary_sin", "aligned",
       [](Problem& p) {
         make_appending(p);
         p.append.rotary_sin = off_by_one_byte(kFloats);
       }},
      {"k_scales", "float8", [](Problem& p) { p.k_scales = kFloats; }},
      {"k_scales", "float8", [](Problem& p) { p.v_scales = kFloats; }},
      {"k_scales", "aligned",
       [](Problem& p) {
         p.k.dtype = p.v.dtype = DType::kFloat8E4M3;
         p.k_scales = off_by_one_byte(kFloats);
       }},
      {"v_scales", "aligned",
       [](Problem& p) {
         p.k.dtype = p.v.dtype = DType::kFloat8E5M2;
         p.v_scales = off_by_one_byte(kFloats);
       }},
  };
  return kBreakers;
}

TEST(Preconditions, EveryRowHasABreakerAndEveryBreakerARow) {
  support::expect_breakers_and_rows_match(problem_preconditions(), valid(), breakers());
}

TEST(Preconditions, ARefusalNamesArgumentValueAndWhatIsAllowed) {
  support::expect_refusals_explain_themselves(problem_preconditions(), valid(), breakers());
}

TEST(Preconditions, FloatsAreShownAsTheyAre) {
  Problem p = valid();
  p.scores.softcap = -0.5F;
  EXPECT_STREQ(problem_preconditions().check(p).message, "scores.softcap = -0.5: allowed 0 (none) or 1e-30 to 1e30");
  p = valid();
  p.scores.scale = -INFINITY;
  EXPECT_STREQ(problem_preconditions().check(p).message, "scores.scale = -inf: must be finite");
}

TEST(Preconditions, WhatLiesJustInsideIsAllowed) {
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem&) {},
      [](Problem& p) {  // new keys have kv_heads heads: one step apart here, where q_heads would take three
        make_appending(p);
        p.append.k.strides.head = p.append.v.strides.head = std::int64_t{1} << 56;
      },
      [](Problem& p) { p.batch = 0; },
      [](Problem& p) { p.batch = INT32_MAX; },
      [](Problem& p) { p.head_dim = 1; },
      [](Problem& p) { p.head_dim = p.value_dim = kMaxHeadDim, p.o.strides = {4608, 576, 2304, 1}; },
      [](Problem& p) { p.lse.data = nullptr; },
      [](Problem& p) { p.scores.scale = -1.0F; },
      [](Problem& p) { p.scores.scale = -1e38F, p.scores.softcap = 1e30F; },
      [](Problem& p) { p.scores.scale = 1e-37F, p.scores.softcap = 1e-30F; },
      [](Problem& p) { p.scores.scale = -0.0F, p.scores.softcap = 30.0F; },
      [](Problem& p) { p.scores.window_left = p.scores.window_right = 0; },
      [](Problem& p) { p.scores.mask = off_by(1, kFloats), p.scores.mask_is_boolean = true; },
      [](Problem& p) { p.scores.mask = kFloats, p.scores.mask_dtype = DType::kFloat16, p.scores.mask_strides = {0, 0, 0, -1}; },
      [](Problem& p) { p.scores.alibi_slopes = p.scores.sinks = kFloats, p.scores.tree_mask = kBits; },
      [](Problem& p) { p.k.dtype = p.v.dtype = DType::kFloat8E4M3; },
      [](Problem& p) {
        p.q.dtype = p.o.dtype = DType::kFloat32;
        p.k.dtype = p.v.dtype = DType::kFloat8E5M2;
      },
      [](Problem& p) {
        p.k.dtype = p.v.dtype = DType::kFloat8E4M3;
        p.k_scales = p.v_scales = kFloats;
      },
      [](Problem& p) { p.k.strides = p.v.strides = {0, 0, 0, 0}; },           // one element stands for all
      [](Problem& p) { p.q.strides = p.o.strides = {-512, -64, -256, -1}; },  // backwards
      [](Problem& p) { p.k.strides.token = (std::int64_t{1} << 57) / 100; },
      [](Problem& p) {
        p.append = {.k = p.k, .v = p.v, .rotary_cos = kFloats, .rotary_sin = kFloats, .rotary_dim = 64};
        p.kv_lengths = kInts;
      },
      [](Problem& p) { make_packed(p); },
      [](Problem& p) { make_appending(p), make_packed(p), p.kv_lengths = nullptr; },
      [](Problem& p) { make_most_rows(p); },
      [](Problem& p) { make_most_rows(p), p.kv_capacity = (1 << 17) - 1; },
      [](Problem& p) { p.batch = p.q_heads = p.kv_heads = 1, p.q_tokens = INT32_MAX; },
      [](Problem& p) { make_packed(p), p.q_tokens = INT32_MAX; },  // no sequence has more than all have
      [](Problem& p) { make_paged(p); },
      [](Problem& p) { make_paged(p), p.batch = 1, p.pages.block_table_stride = 0; },
      [](Problem& p) { make_paged(p), p.kv_capacity = 7 * 16; },  // as many pages as a row has
      [](Problem& p) { make_paged(p), p.kv_capacity = INT32_MAX, p.pages.page_tokens = INT32_MAX / 7 + 1; },
      [](Problem& p) { p.pages = {.page_tokens = 1, .page_count = INT32_MAX, .page_indptr = kInts, .page_indices = kInts}; },
      [](Problem& p) { p.batch = 0, p.q.data = p.k.data = p.v.data = p.o.data = nullptr; },
      [](Problem& p) { p.kv_capacity = 0, p.k.data = p.v.data = nullptr; },
      [](Problem& p) { make_paged(p), p.kv_capacity = 0, p.pages.page_count = 0, p.k.data = p.v.data = nullptr; },
      [](Problem& p) { make_packed(p), p.total_q_tokens = 0, p.q.data = p.k.data = p.v.data = p.o.data = nullptr; },
      [](Problem& p) { make_packed(p), p.total_kv_tokens = 0, p.k.data = p.v.data = nullptr; },
      [](Problem& p) {  // axes of length 1 may have any stride
        p.batch = p.q_heads = p.kv_heads = p.q_tokens = 1;
        p.o.strides = {0, 0, 0, 1};
        p.lse.sequence_stride = p.lse.head_stride = p.lse.token_stride = 0;
      },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Problem p = valid();
    changes[i](p);
    const Status status = problem_preconditions().check(p);
    EXPECT_TRUE(status.ok()) << "change " << i << ": " << status.message;
  }
}

/// Whatever bits a problem holds, looking at it reads no pointer's target and no product wraps (UBSan).
TEST(Preconditions, R20_R31_AnyBitsGiveAnAnswer) {
  std::int64_t refused = 0;
  for (std::uint64_t seed = 1; seed <= support::full_or_reduced(200'000U, 20'000U); ++seed) {
    Problem p = valid();
    support::scramble(p, seed);
    p.scores.causal = p.scores.mask_is_boolean = p.append.rotary_interleaved = p.scales_per_head = false;  // no bits but 0 and 1
    refused += problem_preconditions().check(p).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace lean

// What a call may ask for beyond one query token and contiguous K and V, each beside the row without it: layouts, pages, fp8,
// query tokens, rules of scores.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

void add_layouts(Matrix& matrix) {
  const auto add = [&](const char* name, const Lengths& lengths, const Heads& heads, Layout layout,
                       DType dtype = DType::kBFloat16) {
    ProblemSpec spec = decode_of(lengths, heads, dtype);
    spec.layout = layout;
    matrix.add(name, std::move(spec));
  };
  add("bshd 1x8k", uniform(1, 8 * k), kLlama8B, Layout::kBshd);
  add("bshd 1x128k", uniform(1, 128 * k), kLlama8B, Layout::kBshd);
  add("bshd 8x8k", uniform(8, 8 * k), kLlama8B, Layout::kBshd);
  add("bshd 34x16k", uniform(34, 16 * k), kLlama8B, Layout::kBshd);
  add("bshd 64x8k", uniform(64, 8 * k), kLlama8B, Layout::kBshd);
  add("bshd 9x16k", uniform(9, 16 * k), kMha, Layout::kBshd);
  add("bshd 1x128k", uniform(1, 128 * k), kGptOss, Layout::kBshd);
  add("bshd 6x48x4k", uniform(6, 4 * k), {48, 48, 64}, Layout::kBshd, DType::kFloat16);
  add("ragged 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B, Layout::kShd);
  add("ragged zipf128", zipf(128, 128 * k, 1 * k), kLlama8B, Layout::kShd);
}

/// Beside "L8B 8x8k" of tier a, the same bytes without pages.
void add_pages(Matrix& matrix) {
  for (const std::int32_t page_tokens : {1, 16, 64, 256}) {
    for (const auto& [order, layout] : kPageOrders) {
      ProblemSpec spec = decode_of(uniform(8, 8 * k), kLlama8B);
      spec.page_tokens = page_tokens;
      spec.layout = layout;
      matrix.add(fmt::format("pages of {} {} 8x8k", page_tokens, order), std::move(spec));
    }
  }
}

/// The tokens of rows with 16-bit K and V: half their bytes.
void add_fp8(Matrix& matrix) {
  const auto add = [&](const char* name, const Lengths& lengths, const Heads& heads, DType kv_dtype = DType::kFloat8E4M3,
                       DType dtype = DType::kBFloat16) {
    ProblemSpec spec = decode_of(lengths, heads, dtype);
    spec.kv_dtype = kv_dtype;
    matrix.add(name, std::move(spec));
  };
  add("P13 6x48x64k", uniform(6, 64 * k), {48, 48, 64}, DType::kFloat8E4M3, DType::kFloat16);
  add("L8B 1x8k", uniform(1, 8 * k), kLlama8B);
  add("L8B 1x128k", uniform(1, 128 * k), kLlama8B);
  add("L8B 8x8k", uniform(8, 8 * k), kLlama8B);
  add("L8B 8x8k", uniform(8, 8 * k), kLlama8B, DType::kFloat8E5M2);
  add("L8B 8x8k", uniform(8, 8 * k), kLlama8B, DType::kFloat8E4M3, DType::kFloat16);
  add("L8B 32x4k", uniform(32, 4 * k), kLlama8B);
  add("L8B 34x16k", uniform(34, 16 * k), kLlama8B);
  add("L8B 64x8k", uniform(64, 8 * k), kLlama8B);
  add("70B 8x32k", uniform(8, 32 * k), kLlama70B);
  add("Phi3m 27x16k", uniform(27, 16 * k), kPhi3Medium);
  add("OSS 1x128k d64", uniform(1, 128 * k), kGptOss);
  add("gemma2-9b 8x32k", uniform(8, 32 * k), kGemma2);
  add("R1 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B);
  for (const auto& [order, layout] : kPageOrders) {
    ProblemSpec spec = decode_of(uniform(8, 8 * k), kLlama8B);
    spec.kv_dtype = DType::kFloat8E4M3;
    spec.page_tokens = 16;
    spec.layout = layout;
    matrix.add(fmt::format("pages of 16 {} 8x8k", order), std::move(spec));
  }
}

void add_query_tokens(Matrix& matrix) {
  for (const std::int32_t q_tokens : {2, 4, 8, 16}) {
    for (const auto& [batch, tokens] : {std::pair{1, 8 * k}, {1, 128 * k}, {8, 8 * k}, {64, 8 * k}}) {
      ProblemSpec spec = decode_of(uniform(batch, tokens), kLlama8B);
      spec.q_tokens = q_tokens;
      spec.causal = true;
      matrix.add(fmt::format("n_q {}x{}", batch, tokens_text(tokens)), std::move(spec));
    }
  }
}

/// One rule alone on two sizes, and those of models that have them.
void add_score_rules(Matrix& matrix) {
  const auto add = [&](const std::string& name, const Lengths& lengths, const Heads& heads, auto rule) {
    ProblemSpec spec = decode_of(lengths, heads);
    rule(spec);
    matrix.add(name, std::move(spec));
  };
  const auto add_both = [&](const std::string& name, auto rule) {
    add(name + " 8x8k", uniform(8, 8 * k), kLlama8B, rule);
    add(name + " 1x128k", uniform(1, 128 * k), kLlama8B, rule);
  };
  add_both("softcap 50", [](ProblemSpec& spec) { spec.softcap = 50.0F; });
  add_both("window 4k", [](ProblemSpec& spec) { spec.window_left = 4 * k - 1; });
  add_both("sinks", [](ProblemSpec& spec) { spec.sinks = true; });
  add_both("alibi", [](ProblemSpec& spec) { spec.alibi = true; });
  add("gpt-oss sinks 8x32k", uniform(8, 32 * k), kGptOss, [](ProblemSpec& spec) { spec.sinks = true; });
  add("gpt-oss sinks window 128 8x32k", uniform(8, 32 * k), kGptOss, [](ProblemSpec& spec) {
    spec.sinks = true;
    spec.window_left = 127;
  });
  add("gemma2-9b softcap 50 8x8k", uniform(8, 8 * k), kGemma2, [](ProblemSpec& spec) { spec.softcap = 50.0F; });
  add("gemma2-9b softcap 50 window 4k 8x8k", uniform(8, 8 * k), kGemma2, [](ProblemSpec& spec) {
    spec.softcap = 50.0F;
    spec.window_left = 4 * k - 1;
  });
}

}  // namespace

void add_features(Matrix& matrix) {
  matrix.begin(Suite::kFeatures, Tier::kB);
  add_layouts(matrix);
  add_pages(matrix);
  add_fp8(matrix);
  add_query_tokens(matrix);
  matrix.begin(Suite::kFeatures);
  add_score_rules(matrix);
}

void add_plain_beside_features(Matrix& matrix) {
  matrix.begin(Suite::kFeatures);
  std::vector<ProblemSpec> plain;
  for (const BenchRow& row : matrix.rows()) {
    if (row.suite != Suite::kFeatures) continue;
    plain.push_back(decode_of(row.spec.kv_lens, {row.spec.q_heads, row.spec.kv_heads, row.spec.head_dim}, row.spec.dtype));
  }
  for (ProblemSpec& spec : plain) {
    const std::string size = fmt::format("{}x{}", spec.kv_lens.size(), tokens_text(spec.kv_lens[0]));
    matrix.add("plain " + size, std::move(spec));
  }
}

}  // namespace lean::cli::suites

#include "cli/gpu_matrix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/int_math.hpp"
#include "cli/trace.hpp"

namespace lean::cli {
namespace {

using Lengths = std::vector<std::int32_t>;

constexpr std::int32_t k = 1024;  // tokens, as in 4k
constexpr std::int64_t kMaxModelBytes = 20'000'000'000;
constexpr std::int64_t kFlatnessBytes = std::int64_t{512} << 20;

struct Heads {
  std::int32_t q;
  std::int32_t kv;
  std::int32_t dim;
};

struct Model {
  const char* name;
  Heads heads;
};

constexpr Heads kLlama8B{32, 8, 128};
constexpr Heads kLlama70B{64, 8, 128};
constexpr Heads kLlama70BSlice{8, 1, 128};  // of 8, by tensor parallelism
constexpr Heads kPhi3Medium{40, 10, 128};
constexpr Heads kGptOss{64, 8, 64};
constexpr Heads kMha{32, 32, 128};
constexpr Heads kQwen3{32, 4, 128};

constexpr Model kModels[] = {{"llama-8b", kLlama8B},       {"llama-70b", kLlama70B},    {"llama-70b/8", kLlama70BSlice},
                             {"phi3-medium", kPhi3Medium}, {"phi3-mini", {32, 32, 96}}, {"qwen3-30b", kQwen3},
                             {"gpt-oss", kGptOss},         {"gemma2-9b", {16, 8, 256}}, {"opt-30b", {56, 56, 128}},
                             {"opt-1.3b", {32, 32, 64}}};
constexpr std::int32_t kModelBatches[] = {1, 8, 32, 34, 64};
constexpr std::int32_t kModelTokens[] = {1 * k, 4 * k, 8 * k, 16 * k, 32 * k, 128 * k};

Lengths uniform(std::int32_t batch, std::int32_t tokens) { return Lengths(static_cast<std::size_t>(batch), tokens); }

Lengths one_long(std::int32_t longest, std::int32_t others, std::int32_t tokens) {
  Lengths lengths = uniform(others + 1, tokens);
  lengths[0] = longest;
  return lengths;
}

Lengths linear(std::int32_t batch, std::int32_t step) {
  Lengths lengths;
  for (std::int32_t i = 1; i <= batch; ++i) lengths.push_back(i * step);
  return lengths;
}

Lengths zipf(std::int32_t batch, std::int32_t longest, std::int32_t least) {
  Lengths lengths;
  for (std::int32_t i = 1; i <= batch; ++i) lengths.push_back(std::max(least, longest / i));
  return lengths;
}

/// One request of `longest` tokens; the others equal, so that average / longest is `ratio`.
Lengths with_ratio(std::int32_t batch, std::int32_t longest, double ratio) {
  const double others = (ratio * batch - 1.0) * longest / (batch - 1);
  return one_long(longest, batch - 1, static_cast<std::int32_t>(std::lround(others)));
}

std::string tokens_text(std::int32_t tokens) { return tokens % k == 0 ? fmt::format("{}k", tokens / k) : std::to_string(tokens); }

ProblemSpec spec_of(Lengths lengths, const Heads& heads, DType dtype = DType::kBFloat16) {
  ProblemSpec spec{.kv_lens = std::move(lengths), .q_heads = heads.q, .kv_heads = heads.kv, .head_dim = heads.dim, .dtype = dtype};
  spec.layout = natural_layout(spec.kv_lens);
  return spec;
}

/// Named as in the peers' result file.
std::vector<GpuRow> tier_a() {
  std::vector<GpuRow> rows;
  const auto add = [&](const char* id, Lengths lengths, const Heads& heads, DType dtype = DType::kBFloat16) {
    rows.push_back({.id = id, .tier = 'a', .spec = spec_of(std::move(lengths), heads, dtype)});
  };
  const auto paper = [&](const char* id, std::int32_t batch, std::int32_t heads, std::int32_t tokens, std::int32_t dim = 64) {
    add(id, uniform(batch, tokens), {heads, heads, dim}, DType::kFloat16);
  };
  paper("P1 4x32x1k", 4, 32, 1 * k);
  paper("P2 4x32x16k", 4, 32, 16 * k);
  paper("P3 4x32x256k", 4, 32, 256 * k);
  paper("P8 2x56x256k", 2, 56, 256 * k);
  paper("P10 1x56x64k", 1, 56, 64 * k);
  paper("P12 6x48x4k", 6, 48, 4 * k);
  paper("P13 6x48x64k", 6, 48, 64 * k);
  paper("P15 6x12x64k", 6, 12, 64 * k);
  paper("P18 6x56x64k", 6, 56, 64 * k);
  paper("P24 1x32x8k d128", 1, 32, 8 * k, 128);
  paper("P25 1x32x128k d128", 1, 32, 128 * k, 128);
  add("L8B 1x1k", uniform(1, 1 * k), kLlama8B);
  add("L8B 1x8k", uniform(1, 8 * k), kLlama8B);
  add("L8B 1x32k", uniform(1, 32 * k), kLlama8B);
  add("L8B 1x128k", uniform(1, 128 * k), kLlama8B);
  add("L8B 8x8k", uniform(8, 8 * k), kLlama8B);
  add("L8B 32x4k", uniform(32, 4 * k), kLlama8B);
  add("L8B 34x16k", uniform(34, 16 * k), kLlama8B);
  add("L8B 64x8k", uniform(64, 8 * k), kLlama8B);
  add("70B/8 1x128k", uniform(1, 128 * k), kLlama70BSlice);
  add("70B/8 16x32k", uniform(16, 32 * k), kLlama70BSlice);
  add("70B 8x32k", uniform(8, 32 * k), kLlama70B);
  add("Phi3m 1x8k", uniform(1, 8 * k), kPhi3Medium);
  add("Phi3m 1x128k", uniform(1, 128 * k), kPhi3Medium);
  add("Phi3m 27x16k", uniform(27, 16 * k), kPhi3Medium);
  add("MHA 9x16k d128", uniform(9, 16 * k), kMha, DType::kFloat16);
  add("OSS 1x128k d64", uniform(1, 128 * k), kGptOss);
  add("R1 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B);
  add("R2 128k+31x2k", one_long(128 * k, 31, 2 * k), kLlama8B);
  add("R4 linear 1k..32k", linear(32, 1 * k), kLlama8B);
  add("R5 zipf128", zipf(128, 128 * k, 1 * k), kLlama8B);
  add("R6 64k+15x2k phi", one_long(64 * k, 15, 2 * k), kPhi3Medium);
  add("R8 64k+7x2k MHA", one_long(64 * k, 7, 2 * k), kMha);
  add("R11 256k+63x4k", one_long(256 * k, 63, 4 * k), kQwen3);
  return rows;
}

/// Rows of tier B, each once, and none that tier A has.
class TierB {
 public:
  TierB() : known_(tier_a()) {}

  void add(const std::string& name, ProblemSpec spec, std::string missing = "") {
    const auto is_same = [&](const GpuRow& row) { return row.missing.empty() && missing.empty() && row.spec == spec; };
    if (std::any_of(known_.begin(), known_.end(), is_same) || std::any_of(rows_.begin(), rows_.end(), is_same)) return;
    add_again(name, std::move(spec), std::move(missing));
  }

  /// Also where the same problem has another name already.
  void add_again(const std::string& name, ProblemSpec spec, std::string missing = "") {
    const std::string kv_type = spec.kv_dtype ? fmt::format(" {}", name_of(*spec.kv_dtype)) : "";
    const std::string id = fmt::format("{} {}/{} d{} {}{} {} n_q{}", name, spec.q_heads, spec.kv_heads, spec.head_dim,
                                       name_of(spec.dtype), kv_type, name_of(spec.layout), spec.q_tokens);
    rows_.push_back({.id = id, .tier = 'b', .spec = std::move(spec), .missing = std::move(missing)});
  }

  void add_laid_out(const std::string& name, ProblemSpec spec, Layout layout) {
    spec.layout = layout;
    add(name, std::move(spec));
  }

  [[nodiscard]] std::vector<GpuRow> rows() && { return std::move(rows_); }

 private:
  std::vector<GpuRow> known_;
  std::vector<GpuRow> rows_;
};

void add_paper_rows(TierB& rows) {
  const auto add = [&](std::int32_t batch, std::int32_t heads, std::int32_t tokens, std::int32_t dim = 64) {
    rows.add(fmt::format("paper {}x{}x{}", batch, heads, tokens_text(tokens)),
             spec_of(uniform(batch, tokens), {heads, heads, dim}, DType::kFloat16));
  };
  for (const std::int32_t tokens : {1 * k, 4 * k, 16 * k, 64 * k, 256 * k}) add(4, 32, tokens);
  for (const std::int32_t heads : {12, 24, 40, 56}) add(4, heads, 256 * k);
  add(2, 56, 256 * k);
  for (const std::int32_t tokens : {64 * k, 128 * k, 256 * k}) add(1, 56, tokens);
  for (const std::int32_t tokens : {1 * k, 4 * k, 16 * k, 64 * k}) add(6, 48, tokens);
  for (const std::int32_t heads : {12, 24, 32, 40, 56}) add(6, heads, 64 * k);
  for (const std::int32_t batch : {1, 2, 4, 8, 16}) add(batch, 48, 64 * k);
  add(4, 56, 128 * k);
  add(8, 12, 512 * k);
  for (const std::int32_t tokens : {8 * k, 128 * k}) add(1, 32, tokens, 128);
  add(4, 40, 128 * k, 128);
  for (std::int32_t tokens = 1 * k; tokens <= 128 * k; tokens *= 2) add(1, 40, tokens, 128);
}

void add_model_rows(TierB& rows) {
  for (const Model& model : kModels) {
    for (const std::int32_t batch : kModelBatches) {
      for (const std::int32_t tokens : kModelTokens) {
        ProblemSpec spec = spec_of(uniform(batch, tokens), model.heads);
        if (spec.kv_bytes() > kMaxModelBytes) continue;
        rows.add(fmt::format("{} {}x{}", model.name, batch, tokens_text(tokens)), std::move(spec));
      }
    }
  }
}

void add_trace_rows(TierB& rows, const std::string& trace) {
  rows.add("ragged azure-conv 16", spec_of(pick_lengths(conv32_lengths(), 16, Pick::kSpread), kLlama8B));
  Lengths lengths = conv32_lengths();
  for (const std::int32_t requests : {32, 64, 128}) {
    while (static_cast<std::int32_t>(lengths.size()) < requests) lengths.insert(lengths.end(), lengths.begin(), lengths.end());
    rows.add(fmt::format("ragged azure-conv {}", requests), spec_of(lengths, kLlama8B));
  }
  if (trace.empty()) return;
  for (const std::int32_t requests : {16, 64, 128}) {
    rows.add(fmt::format("ragged trace {}", requests), spec_of(trace_lengths(trace, requests, Pick::kSpread), kLlama8B));
  }
}

void add_ragged_rows(TierB& rows) {
  rows.add("ragged 128k+15x4k", spec_of(one_long(128 * k, 15, 4 * k), kLlama8B));
  for (const std::int32_t batch : {2, 4, 8, 16}) {
    for (const double ratio : {1.0, 0.75, 0.5, 0.25, 0.1}) {
      if (ratio * batch <= 1.0) continue;  // the longest alone would be more
      rows.add(fmt::format("ragged avg/max {} b{}", ratio, batch), spec_of(with_ratio(batch, 64 * k, ratio), kLlama8B));
    }
  }
}

/// One size, 1 to 1024 outputs; numbers that do not go into 132 multiprocessors among them.
void add_flatness_rows(TierB& rows) {
  constexpr std::int32_t kGroup = 4;
  constexpr std::int32_t kDim = 128;
  for (const std::int32_t outputs :
       {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 66, 96, 100, 128, 132, 133, 192, 200, 256, 264, 384, 512, 768, 1024}) {
    std::int32_t kv_heads = 8;
    while (outputs % kv_heads != 0) --kv_heads;
    const std::int64_t tokens = ceil_div(kFlatnessBytes, std::int64_t{outputs} * 2 * kDim * bytes_of(DType::kBFloat16));
    const Heads heads{kv_heads * kGroup, kv_heads, kDim};
    rows.add_again(fmt::format("{}{} ({}x{})", kFlatnessPrefix, outputs, outputs / kv_heads, kv_heads),
                   spec_of(uniform(outputs / kv_heads, static_cast<std::int32_t>(tokens)), heads));
  }
}

void add_layout_rows(TierB& rows) {
  rows.add_laid_out("bshd 1x8k", spec_of(uniform(1, 8 * k), kLlama8B), Layout::kBshd);
  rows.add_laid_out("bshd 1x128k", spec_of(uniform(1, 128 * k), kLlama8B), Layout::kBshd);
  rows.add_laid_out("bshd 8x8k", spec_of(uniform(8, 8 * k), kLlama8B), Layout::kBshd);
  rows.add_laid_out("bshd 34x16k", spec_of(uniform(34, 16 * k), kLlama8B), Layout::kBshd);
  rows.add_laid_out("bshd 64x8k", spec_of(uniform(64, 8 * k), kLlama8B), Layout::kBshd);
  rows.add_laid_out("bshd 9x16k", spec_of(uniform(9, 16 * k), kMha), Layout::kBshd);
  rows.add_laid_out("bshd 1x128k", spec_of(uniform(1, 128 * k), kGptOss), Layout::kBshd);
  rows.add_laid_out("bshd 6x48x4k", spec_of(uniform(6, 4 * k), {48, 48, 64}, DType::kFloat16), Layout::kBshd);
  rows.add_laid_out("ragged 128k+63x1k", spec_of(one_long(128 * k, 63, 1 * k), kLlama8B), Layout::kShd);
  rows.add_laid_out("ragged zipf128", spec_of(zipf(128, 128 * k, 1 * k), kLlama8B), Layout::kShd);
}

void add_query_rows(TierB& rows) {
  for (const std::int32_t q_tokens : {2, 4, 8, 16}) {
    for (const auto& [batch, tokens] : {std::pair{1, 8 * k}, {1, 128 * k}, {8, 8 * k}, {64, 8 * k}}) {
      ProblemSpec spec = spec_of(uniform(batch, tokens), kLlama8B);
      spec.q_tokens = q_tokens;
      spec.causal = true;
      rows.add(fmt::format("n_q {}x{}", batch, tokens_text(tokens)), std::move(spec));
    }
  }
}

void add_short_rows(TierB& rows) {
  rows.add("short 1024x128", spec_of(uniform(1024, 128), kLlama8B));
  rows.add("short 1024x500", spec_of(uniform(1024, 500), kLlama8B));
  rows.add("short 16384x17", spec_of(uniform(16384, 17), kLlama8B));
  rows.add("short 16384x64", spec_of(uniform(16384, 64), kLlama8B));
}

/// Beside "L8B 8x8k" of tier A, the same bytes without pages.
void add_page_rows(TierB& rows) {
  for (const std::int32_t page_tokens : {1, 16, 64, 256}) {
    for (const auto& [order, layout] : {std::pair{"nhd", Layout::kBshd}, {"hnd", Layout::kBhsd}}) {
      ProblemSpec spec = spec_of(uniform(8, 8 * k), kLlama8B);
      spec.page_tokens = page_tokens;
      spec.layout = layout;
      rows.add(fmt::format("pages of {} {} 8x8k", page_tokens, order), std::move(spec));
    }
  }
}

/// The tokens of rows with 16-bit K and V: half their bytes.
void add_fp8_rows(TierB& rows) {
  const auto add = [&](const char* name, Lengths lengths, const Heads& heads, DType kv_dtype = DType::kFloat8E4M3,
                       DType dtype = DType::kBFloat16) {
    ProblemSpec spec = spec_of(std::move(lengths), heads, dtype);
    spec.kv_dtype = kv_dtype;
    rows.add(name, std::move(spec));
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
  add("gemma2-9b 8x32k", uniform(8, 32 * k), {16, 8, 256});
  add("R1 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B);
  for (const auto& [order, layout] : {std::pair{"nhd", Layout::kBshd}, {"hnd", Layout::kBhsd}}) {
    ProblemSpec spec = spec_of(uniform(8, 8 * k), kLlama8B);
    spec.kv_dtype = DType::kFloat8E4M3;
    spec.page_tokens = 16;
    spec.layout = layout;
    rows.add(fmt::format("pages of 16 {} 8x8k", order), std::move(spec));
  }
}

/// Models of tier A as servers keep them: pages of 16, fp8, and four tokens at once to check.
void add_serving_rows(TierB& rows) {
  const auto add = [&](const char* name, const Lengths& lengths, const Heads& heads) {
    const ProblemSpec plain = spec_of(lengths, heads);
    for (const auto& [order, layout] : {std::pair{"nhd", Layout::kBshd}, {"hnd", Layout::kBhsd}}) {
      ProblemSpec paged = plain;
      paged.page_tokens = 16;
      paged.layout = layout;
      rows.add_again(fmt::format("serving {} pages of 16 {}", name, order), paged);
      paged.kv_dtype = DType::kFloat8E4M3;
      rows.add_again(fmt::format("serving {} pages of 16 {}", name, order), std::move(paged));
    }
    ProblemSpec fp8 = plain;
    fp8.kv_dtype = DType::kFloat8E4M3;
    rows.add_again(fmt::format("serving {}", name), std::move(fp8));
    ProblemSpec speculative = plain;
    speculative.q_tokens = 4;
    speculative.causal = true;
    rows.add_again(fmt::format("serving {}", name), std::move(speculative));
  };
  add("L8B 1x8k", uniform(1, 8 * k), kLlama8B);
  add("L8B 1x128k", uniform(1, 128 * k), kLlama8B);
  add("L8B 8x8k", uniform(8, 8 * k), kLlama8B);
  add("L8B 34x16k", uniform(34, 16 * k), kLlama8B);
  add("70B 8x32k", uniform(8, 32 * k), kLlama70B);
  add("70B/8 16x32k", uniform(16, 32 * k), kLlama70BSlice);
  add("Phi3m 27x16k", uniform(27, 16 * k), kPhi3Medium);
  add("OSS 1x128k", uniform(1, 128 * k), kGptOss);
  add("R1 128k+63x1k", one_long(128 * k, 63, 1 * k), kLlama8B);
}

/// Declared, but this command makes no such call; bench/prefill_mix.py does.
void add_missing_rows(TierB& rows) {
  rows.add("mixed 2x2k prefill + 62x8k", spec_of(uniform(64, 8 * k), kLlama8B), "query lengths that differ in a batch");
}

}  // namespace

std::vector<GpuRow> gpu_matrix(const std::string& tier, const std::string& trace) {
  std::vector<GpuRow> rows;
  if (tier != "b") rows = tier_a();
  if (tier == "a") return rows;
  TierB b;
  add_flatness_rows(b);
  add_ragged_rows(b);
  add_trace_rows(b, trace);
  add_layout_rows(b);
  add_page_rows(b);
  add_fp8_rows(b);
  add_query_rows(b);
  add_serving_rows(b);
  add_short_rows(b);
  add_paper_rows(b);
  add_model_rows(b);
  add_missing_rows(b);
  for (GpuRow& row : std::move(b).rows()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace lean::cli

// Models by name: every batch with every context, as far as a GPU has memory for K and V.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

constexpr std::int64_t kMaxModelBytes = 20'000'000'000;

struct Model {
  const char* name;
  Heads heads;
};

constexpr Model kModels[] = {{"llama-8b", kLlama8B},       {"llama-70b", kLlama70B},    {"llama-70b/8", kLlama70BSlice},
                             {"phi3-medium", kPhi3Medium}, {"phi3-mini", {32, 32, 96}}, {"qwen3-30b", kQwen3},
                             {"gpt-oss", kGptOss},         {"gemma2-9b", kGemma2},      {"opt-30b", {56, 56, 128}},
                             {"opt-1.3b", {32, 32, 64}}};
constexpr std::int32_t kModelBatches[] = {1, 8, 32, 34, 64};
constexpr std::int32_t kModelTokens[] = {1 * k, 4 * k, 8 * k, 16 * k, 32 * k, 128 * k};

}  // namespace

void add_models(Matrix& matrix) {
  matrix.begin(Suite::kModels, Tier::kB);
  for (const Model& model : kModels) {
    for (const std::int32_t batch : kModelBatches) {
      for (const std::int32_t tokens : kModelTokens) {
        ProblemSpec spec = decode_of(uniform(batch, tokens), model.heads);
        if (spec.kv_bytes() > kMaxModelBytes) continue;
        matrix.add(fmt::format("{} {}x{}", model.name, batch, tokens_text(tokens)), std::move(spec));
      }
    }
  }
}

}  // namespace lean::cli::suites

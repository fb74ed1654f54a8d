// Chunks of prefill: 64 to 16k query tokens, which are the last of their contexts. What MLA's decode is, K and V of different
// widths that share memory, the command cannot say (--head-dim is of both); Python can.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

struct Chunk {
  std::int32_t batch;
  std::int32_t q_tokens;
  std::int32_t kv_tokens;
};

void add(Matrix& matrix, const char* model, const Heads& heads, const Chunk& chunk, bool causal = true) {
  ProblemSpec spec = decode_of(uniform(chunk.batch, chunk.kv_tokens), heads);
  spec.q_tokens = chunk.q_tokens;
  spec.causal = causal;
  matrix.add(fmt::format("wide {} {}x({} of {}) {}", model, chunk.batch, tokens_text(chunk.q_tokens), tokens_text(chunk.kv_tokens),
                         causal ? "causal" : "full"),
             std::move(spec));
}

}  // namespace

void add_wide(Matrix& matrix) {
  matrix.begin(Suite::kWide);
  for (const std::int32_t q_tokens : {64, 256, 1 * k, 4 * k, 16 * k}) {
    for (const std::int32_t kv_tokens : {1 * k, 4 * k, 16 * k, 32 * k, 128 * k}) {
      if (kv_tokens >= q_tokens) add(matrix, "llama-8b", kLlama8B, {1, q_tokens, kv_tokens});
    }
  }
  for (const std::int32_t q_tokens : {64, 1 * k, 16 * k}) {
    for (const std::int32_t kv_tokens : {4 * k, 32 * k, 128 * k}) {
      if (kv_tokens >= q_tokens) add(matrix, "llama-8b", kLlama8B, {1, q_tokens, kv_tokens}, /*causal=*/false);
    }
  }
  for (const Chunk& chunk : {Chunk{64, 64, 4 * k}, {16, 256, 8 * k}, {8, 512, 4 * k}, {4, 2 * k, 8 * k}}) {
    add(matrix, "llama-8b", kLlama8B, chunk);
  }
  const Chunk chunk{1, 4 * k, 32 * k};
  add(matrix, "llama-70b", kLlama70B, chunk);
  add(matrix, "llama-70b/8", kLlama70BSlice, chunk);
  add(matrix, "phi3-medium", kPhi3Medium, chunk);
  add(matrix, "gpt-oss", kGptOss, chunk);
  add(matrix, "gemma2-9b", kGemma2, chunk);
  add(matrix, "mha", kMha, chunk);
  // Declared, but this command makes no such call; bench/suite.py does (--suite mixed).
  matrix.begin(Suite::kWide, Tier::kB);
  matrix.add("mixed 2x2k prefill + 62x8k", decode_of(uniform(64, 8 * k), kLlama8B), "query lengths that differ in a batch");
}

}  // namespace lean::cli::suites

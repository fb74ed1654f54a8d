// Models of tier a as servers keep them: pages of 16, fp8, and four tokens at once to check.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {

void add_serving(Matrix& matrix) {
  matrix.begin(Suite::kServing, Tier::kB);
  const auto add = [&](const char* name, const Lengths& lengths, const Heads& heads) {
    const ProblemSpec plain = decode_of(lengths, heads);
    for (const auto& [order, layout] : kPageOrders) {
      ProblemSpec paged = plain;
      paged.page_tokens = 16;
      paged.layout = layout;
      matrix.add_again(fmt::format("serving {} pages of 16 {}", name, order), paged);
      paged.kv_dtype = DType::kFloat8E4M3;
      matrix.add_again(fmt::format("serving {} pages of 16 {}", name, order), std::move(paged));
    }
    ProblemSpec fp8 = plain;
    fp8.kv_dtype = DType::kFloat8E4M3;
    matrix.add_again(fmt::format("serving {}", name), std::move(fp8));
    ProblemSpec speculative = plain;
    speculative.q_tokens = 4;
    speculative.causal = true;
    matrix.add_again(fmt::format("serving {}", name), std::move(speculative));
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

}  // namespace lean::cli::suites

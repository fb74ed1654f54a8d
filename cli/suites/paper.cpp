// The paper's sweeps over context, heads and batch: fp16, as many key/value heads as query heads, of 64; and of 128.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {

void add_paper(Matrix& matrix) {
  matrix.begin(Suite::kPaper, Tier::kB);
  const auto add = [&](std::int32_t batch, std::int32_t heads, std::int32_t tokens, std::int32_t dim = 64) {
    matrix.add(fmt::format("paper {}x{}x{}", batch, heads, tokens_text(tokens)),
               decode_of(uniform(batch, tokens), {heads, heads, dim}, DType::kFloat16));
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

}  // namespace lean::cli::suites

#include "cli/suites/declarations.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lean::cli::suites {

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

std::string tokens_text(std::int32_t tokens) { return tokens % k == 0 ? fmt::format("{}k", tokens / k) : std::to_string(tokens); }

ProblemSpec decode_of(Lengths lengths, const Heads& heads, DType dtype) {
  ProblemSpec spec{.kv_lens = std::move(lengths), .q_heads = heads.q, .kv_heads = heads.kv, .head_dim = heads.dim, .dtype = dtype};
  spec.layout = natural_layout(spec.kv_lens);
  return spec;
}

}  // namespace lean::cli::suites

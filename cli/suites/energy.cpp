// The four rows of `lean bench --energy`: the paper's one request of 56 heads of 64 at two lengths, and two of tier a, a long
// context alone and one beside many short ones. They have ids of their own, so that joules and times are never taken for one row.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {

void add_energy(Matrix& matrix) {
  matrix.begin(Suite::kEnergy);
  for (const std::int32_t tokens : {128 * k, 512 * k}) {
    matrix.add_as(fmt::format("energy 1x56x{} d64", tokens_text(tokens)),
                  decode_of(uniform(1, tokens), {56, 56, 64}, DType::kFloat16));
  }
  for (const char* id : {"L8B 1x128k", "R1 128k+63x1k"}) matrix.add_as(std::string("energy ") + id, matrix.spec_of(id));
}

}  // namespace lean::cli::suites

// One size, 1 to 1024 outputs; numbers that do not go into 132 multiprocessors among them.
#include <fmt/format.h>

#include "base/int_math.hpp"
#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

constexpr std::int64_t kFlatnessBytes = std::int64_t{512} << 20;
constexpr std::int32_t kGroup = 4;
constexpr std::int32_t kDim = 128;
constexpr std::int32_t kOutputs[] = {1,  2,   3,   4,   6,   8,   12,  16,  24,  32,  48,  64,  66,
                                     96, 100, 128, 132, 133, 192, 200, 256, 264, 384, 512, 768, 1024};

}  // namespace

void add_flatness(Matrix& matrix) {
  matrix.begin(Suite::kFlatness, Tier::kB);
  for (const std::int32_t outputs : kOutputs) {
    std::int32_t kv_heads = 8;
    while (outputs % kv_heads != 0) --kv_heads;
    const std::int64_t tokens = ceil_div(kFlatnessBytes, std::int64_t{outputs} * 2 * kDim * bytes_of(DType::kBFloat16));
    const Heads heads{kv_heads * kGroup, kv_heads, kDim};
    matrix.add_again(fmt::format("{}{} ({}x{})", kFlatnessPrefix, outputs, outputs / kv_heads, kv_heads),
                     decode_of(uniform(outputs / kv_heads, static_cast<std::int32_t>(tokens)), heads));
  }
}

}  // namespace lean::cli::suites

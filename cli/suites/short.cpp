// Small calls: batches of short contexts, which seldom divide among multiprocessors; 9 to 16 query heads for each of a few
// key/value heads; and two calls of 4 MB that TileOPs publishes times of.
#include <fmt/format.h>

#include "cli/suites/declarations.hpp"

namespace lean::cli::suites {
namespace {

constexpr std::int32_t kBatches[] = {2, 3, 5, 10, 16, 32, 50, 64, 100, 128, 200, 256};
constexpr std::int32_t kTokens[] = {100, 200, 300, 500, 600, 700, 1000, 1500};

void add_batches(Matrix& matrix) {
  for (const std::int32_t batch : kBatches) {
    for (const std::int32_t tokens : kTokens) {
      matrix.add(fmt::format("short {}x{}", batch, tokens), decode_of(uniform(batch, tokens), kLlama8B));
    }
  }
}

void add_groups(Matrix& matrix) {
  const auto add = [&](std::int32_t batch, std::int32_t tokens, std::int32_t group, std::int32_t kv_heads) {
    matrix.add(fmt::format("short {}x{}", batch, tokens), decode_of(uniform(batch, tokens), {group * kv_heads, kv_heads, 128}));
  };
  for (const std::int32_t kv_heads : {1, 2, 3, 4}) {
    for (std::int32_t group = 9; group <= 16; ++group) add(1, 32'000, group, kv_heads);
    for (const std::int32_t group : {9, 12, 16}) add(1, 4'000, group, kv_heads);
    for (const std::int32_t group : {9, 12, 16}) add(8, 4'000, group, kv_heads);
  }
}

/// The two rows of https://github.com/tile-ai/TileOPs/pull/1930: a page's tokens lie one behind the other (NHD).
void add_tileops(Matrix& matrix) {
  const auto add = [&](std::int32_t batch, std::int32_t tokens, const Heads& heads, std::int32_t page_tokens) {
    ProblemSpec spec = decode_of(uniform(batch, tokens), heads, DType::kFloat16);
    spec.page_tokens = page_tokens;
    spec.layout = Layout::kBshd;
    matrix.add(fmt::format("tileops {}x{} pages of {} nhd", batch, tokens, page_tokens), std::move(spec));
  };
  add(1, 512, {16, 16, 128}, 128);
  add(2, 1024, {8, 8, 64}, 256);
}

}  // namespace

void add_short(Matrix& matrix) {
  matrix.begin(Suite::kShort, Tier::kB);
  matrix.add("short 1024x128", decode_of(uniform(1024, 128), kLlama8B));
  matrix.add("short 1024x500", decode_of(uniform(1024, 500), kLlama8B));
  matrix.add("short 16384x17", decode_of(uniform(16384, 17), kLlama8B));
  matrix.add("short 16384x64", decode_of(uniform(16384, 64), kLlama8B));
  matrix.begin(Suite::kShort);
  add_batches(matrix);
  add_groups(matrix);
  add_tileops(matrix);
}

}  // namespace lean::cli::suites

// What the files of the suites share: the functions that declare their rows, and what rows are made of.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/problem_spec.hpp"
#include "cli/suites/matrix.hpp"

namespace lean::cli::suites {

// Each declares the rows of its suite; ids and problems of earlier ones are known to it.
void add_tier_a(Matrix& matrix);
void add_flatness(Matrix& matrix);
void add_ragged(Matrix& matrix, const std::string& trace);
void add_features(Matrix& matrix);
void add_serving(Matrix& matrix);
void add_short(Matrix& matrix);
void add_paper(Matrix& matrix);
void add_models(Matrix& matrix);
void add_wide(Matrix& matrix);
void add_cpu(Matrix& matrix, std::int64_t kv_bytes);
void add_energy(Matrix& matrix);
/// Comes last: rows of other suites, where they are the same problem.
void add_plain_beside_features(Matrix& matrix);

using Lengths = std::vector<std::int32_t>;

inline constexpr std::int32_t k = 1024;  // tokens, as in 4k

struct Heads {
  std::int32_t q;
  std::int32_t kv;
  std::int32_t dim;
};

inline constexpr Heads kLlama8B{32, 8, 128};
inline constexpr Heads kLlama70B{64, 8, 128};
inline constexpr Heads kLlama70BSlice{8, 1, 128};  // of 8, by tensor parallelism
inline constexpr Heads kPhi3Medium{40, 10, 128};
inline constexpr Heads kGptOss{64, 8, 64};
inline constexpr Heads kGemma2{16, 8, 256};
inline constexpr Heads kMha{32, 32, 128};
inline constexpr Heads kQwen3{32, 4, 128};

/// How servers order the axes of a page: by token, by head.
inline constexpr std::pair<const char*, Layout> kPageOrders[] = {{"nhd", Layout::kBshd}, {"hnd", Layout::kBhsd}};

[[nodiscard]] Lengths uniform(std::int32_t batch, std::int32_t tokens);
[[nodiscard]] Lengths one_long(std::int32_t longest, std::int32_t others, std::int32_t tokens);
[[nodiscard]] Lengths linear(std::int32_t batch, std::int32_t step);
[[nodiscard]] Lengths zipf(std::int32_t batch, std::int32_t longest, std::int32_t least);

/// "4k", or "700" where it is no multiple of 1024.
[[nodiscard]] std::string tokens_text(std::int32_t tokens);

/// One query token; contiguous where the lengths are equal, else packed.
[[nodiscard]] ProblemSpec decode_of(Lengths lengths, const Heads& heads, DType dtype = DType::kBFloat16);

}  // namespace lean::cli::suites

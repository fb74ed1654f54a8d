#include "backends/cuda/unbuilt_features.hpp"

#include <array>

namespace lean::cuda {
namespace {

using P = const Problem&;

constexpr auto kUnsupported = StatusCode::kUnsupported;

constexpr bool is_fp8(DType dtype) noexcept { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }
constexpr std::int64_t as_int(DType dtype) noexcept { return static_cast<std::int64_t>(dtype); }

// clang-format off: one row, one feature
constexpr std::array kUnbuilt = {
    Precondition<Problem>{kUnsupported, "k.dtype", "float8 K/V is not built for CUDA yet: allowed float32, float16, bfloat16",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k.dtype); },
                 [](P p) noexcept { return !is_fp8(p.k.dtype); }},
    Precondition<Problem>{kUnsupported, "scores.mask", "masks are not built for CUDA yet: must be null",
                 [](P p) noexcept -> std::int64_t { return p.scores.mask != nullptr; },
                 [](P p) noexcept { return p.scores.mask == nullptr; }},
    Precondition<Problem>{kUnsupported, "scores.tree_mask", "the tree mask is not built for CUDA yet: must be null",
                 [](P p) noexcept -> std::int64_t { return p.scores.tree_mask != nullptr; },
                 [](P p) noexcept { return p.scores.tree_mask == nullptr; }},
    Precondition<Problem>{kUnsupported, "append.k.data", "append is not built for CUDA yet: must be null",
                 [](P p) noexcept -> std::int64_t { return p.append.k.data != nullptr; },
                 [](P p) noexcept { return p.append.k.data == nullptr; }},
};
// clang-format on

}  // namespace

PreconditionTable<Problem> unbuilt_features() noexcept { return {kUnbuilt.data(), kUnbuilt.size()}; }

}  // namespace lean::cuda

#include "cli/decode_problem.hpp"

#include <cstring>

#include "cli/normal_fill.hpp"

namespace lean::cli {
namespace {

/// Independent streams of numbers from one seed.
enum class Stream : std::uint64_t { kK = 1, kV = 2, kQ = 3 };

std::uint64_t seed_of(std::uint64_t seed, Stream stream) { return seed * 4 + static_cast<std::uint64_t>(stream); }

}  // namespace

KvPool::KvPool(DType pool_dtype, std::int64_t elements, std::uint64_t seed)
    : dtype(pool_dtype), k(elements * bytes_of(pool_dtype)), v(elements * bytes_of(pool_dtype)) {
  normal_fill(k.data(), dtype, elements, seed_of(seed, Stream::kK));
  normal_fill(v.data(), dtype, elements, seed_of(seed, Stream::kV));
}

DecodeProblem::DecodeProblem(const ProblemSpec& spec, const KvPool& pool, std::uint64_t seed)
    : spec_(spec),
      shape_(spec),
      q_(spec.query_elements() * bytes_of(spec.dtype)),
      o_(q_.bytes()),
      lse_(spec.batch() * spec.q_tokens * spec.q_heads * static_cast<std::int64_t>(sizeof(float))),
      problem_(shape_.problem()) {
  normal_fill(q_.data(), spec.dtype, spec.query_elements(), seed_of(seed, Stream::kQ));
  problem_.q.data = q_.data();
  problem_.k.data = pool.k.data();
  problem_.v.data = pool.v.data();
  problem_.o.data = o_.data();
  problem_.lse.data = reinterpret_cast<float*>(lse_.data());
}

void DecodeProblem::poison_outputs() const {
  // All ones is a NaN in each of the types.
  std::memset(o_.data(), 0xFF, static_cast<std::size_t>(o_.bytes()));
  std::memset(lse_.data(), 0xFF, static_cast<std::size_t>(lse_.bytes()));
}

}  // namespace lean::cli

#include "cli/decode_problem.hpp"

#include "base/int_math.hpp"
#include "cli/gpu.hpp"
#include "cli/normal_fill.hpp"

namespace lean::cli {
namespace {

/// Where V begins behind K: huge pages keep to one tensor where there are any.
constexpr std::int64_t kLargeAlignment = std::int64_t{2} << 20;
constexpr std::int64_t kSmallAlignment = 256;

std::int64_t padded_tensor_bytes(DType dtype, std::int64_t elements, Place place) {
  const std::int64_t bytes = elements * bytes_of(dtype);
  return round_up(bytes, place == Place::kHost && bytes >= kLargeAlignment ? kLargeAlignment : kSmallAlignment);
}

/// Independent streams of numbers from one seed.
enum class Stream : std::uint64_t { kK = 1, kV = 2, kQ = 3 };

std::uint64_t seed_of(std::uint64_t seed, Stream stream, std::int64_t copy = 0) {
  return ((static_cast<std::uint64_t>(copy) << 40) + seed) * 4 + static_cast<std::uint64_t>(stream);
}

/// A copy on the GPU of what the problem points to on the host, which then points there.
template <typename T>
Buffer move_to_device(const T*& pointer, const std::vector<T>& values) {
  if (pointer == nullptr) return {};
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  Buffer buffer(bytes, Place::kDevice);
  gpu::copy(buffer.data(), values.data(), bytes);
  pointer = reinterpret_cast<const T*>(buffer.data());
  return buffer;
}

}  // namespace

KvPool::KvPool(DType dtype, std::int64_t elements, std::uint64_t seed, Place place, std::int64_t copies, std::int32_t tensors)
    : dtype_(dtype),
      copies_(copies),
      tensors_(tensors),
      tensor_bytes_(padded_tensor_bytes(dtype, elements, place)),
      memory_(tensors * copies * tensor_bytes_, place) {
  const NormalNumbers numbers(dtype, place);
  for (std::int64_t copy = 0; copy < copies; ++copy) {
    numbers.fill(k(copy), elements, seed_of(seed, Stream::kK, copy));
    if (tensors > 1) numbers.fill(v(copy), elements, seed_of(seed, Stream::kV, copy));
  }
}

std::int64_t KvPool::bytes_for(DType dtype, std::int64_t elements, std::int64_t copies, std::int32_t tensors) {
  return tensors * copies * padded_tensor_bytes(dtype, elements, Place::kDevice);
}

std::int64_t bytes_to_hold(const ProblemSpec& spec, std::int64_t copies) {
  const std::int64_t rows = spec.batch() * spec.q_tokens * spec.q_heads;
  return KvPool::bytes_for(spec.kv_type(), spec.stored_elements(), copies, spec.kv_tensors()) +
         (spec.query_elements() + spec.output_elements()) * bytes_of(spec.dtype) + rows * static_cast<std::int64_t>(sizeof(float));
}

DecodeProblem::DecodeProblem(const ProblemSpec& spec, const KvPool& pool, std::uint64_t seed)
    : spec_(spec),
      pool_(pool),
      shape_(spec),
      q_(spec.query_elements() * bytes_of(spec.dtype), pool.place()),
      o_(spec.output_elements() * bytes_of(spec.dtype), pool.place()),
      lse_(spec.batch() * spec.q_tokens * spec.q_heads * static_cast<std::int64_t>(sizeof(float)), pool.place()),
      problem_(shape_.problem()) {
  NormalNumbers(spec.dtype, pool.place()).fill(q_.data(), spec.query_elements(), seed_of(seed, Stream::kQ));
  problem_.q.data = q_.data();
  if (problem_.kv_capacity > 0) {  // no request has a key: no K, no V
    problem_.k.data = pool.k();
    problem_.v.data = spec.values_in_keys ? pool.k() : pool.v();
  }
  problem_.o.data = o_.data();
  problem_.lse.data = reinterpret_cast<float*>(lse_.data());
  if (pool.place() == Place::kHost) return;
  lengths_ = move_to_device(spec.packed() ? problem_.cu_kv_tokens : problem_.kv_lengths, shape_.lengths());
  block_table_ = move_to_device(problem_.pages.block_table, shape_.block_table());
  alibi_slopes_ = move_to_device(problem_.scores.alibi_slopes, shape_.alibi_slopes());
  sinks_ = move_to_device(problem_.scores.sinks, shape_.sinks());
  gpu::synchronize();
}

Problem DecodeProblem::problem_on(std::int64_t copy) const {
  Problem problem = problem_;
  if (problem.kv_capacity == 0) return problem;
  problem.k.data = pool_.k(copy);
  problem.v.data = spec_.values_in_keys ? pool_.k(copy) : pool_.v(copy);
  return problem;
}

void DecodeProblem::poison_outputs() const {
  // All ones is a NaN in each of the types.
  o_.set_bytes(0xFF);
  lse_.set_bytes(0xFF);
}

}  // namespace lean::cli

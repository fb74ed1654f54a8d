// The oracle on the GPU: attention in fp64 for every row of a problem that is too large for the host's. One block a row, its
// warps take tokens in turn; plain loads, no tiles, no schedule. `lean doctor` holds it against the host's oracle. Scales of fp8
// K/V are 1, and what small queries may lose beside fp8 keys is left out of the facts: numbers drawn here have none so small.
// Serves the command's rules of scores: a causal limit, windows, softcap, ALiBi, sinks.
#include <algorithm>
#include <cmath>
#include <memory>

#include "backends/reference/reference.hpp"
#include "base/with_type.hpp"
#include "cli/cuda/check.hpp"
#include "problem/address.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "problem/sequence.hpp"

namespace lean::cli::gpu {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpThreads;
constexpr int kTokens = 4;             // that a warp loads before it uses one: hides latency, no other meaning
constexpr int kMaxDims = kMaxHeadDim;  // of O

/// Where the answers lie, on the device: reference::Answer's arrays.
struct AnswerView {
  double* o = nullptr;
  double* lse = nullptr;
  double* abs_weighted = nullptr;
  double* squares = nullptr;
  double* bias_weighted = nullptr;  // null: no such rules
  reference::RowFacts* facts = nullptr;
};

__device__ double warp_sum(double x) {
  for (int lane = kWarpThreads / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, lane);
  return x;
}

__device__ double warp_max(double x) {
  for (int lane = kWarpThreads / 2; lane > 0; lane /= 2) x = fmax(x, __shfl_xor_sync(0xFFFFFFFFU, x, lane));
  return x;
}

__device__ double negative_infinity() { return __longlong_as_double(static_cast<long long>(0xFFF0000000000000ULL)); }

/// Elements (token, dim) of one head as double; the lanes of a warp hold neighbouring dims. With pages: of a sequence's head.
template <typename T>
struct HeadView {
  const T* data;
  Strides strides;
  const std::int32_t* page_ids = nullptr;  // null: not paged
  std::int32_t page_tokens = 0;

  __device__ HeadView(const TensorView& tensor, std::int64_t offset)
      : data(static_cast<const T*>(tensor.data) + offset), strides(tensor.strides) {}
  __device__ double operator()(std::int64_t token, int dim) const {
    std::int64_t offset = token * strides.token;
    if (page_ids != nullptr) {
      offset = page_ids[token / page_tokens] * strides.sequence + token % page_tokens * strides.token;
    }
    return static_cast<double>(to_float(data[offset + dim * strides.dim]));
  }
};

template <typename T>
__device__ HeadView<T> kv_view(const Problem& problem, const TensorView& tensor, const Sequence& lengths, HeadPosition at) {
  if (!is_paged(problem.pages)) return {tensor, kv_offset(tensor.strides, lengths, at, problem.cu_kv_tokens != nullptr)};
  HeadView<T> view(tensor, page_offset(tensor.strides, 0, at.head));
  view.page_ids = page_ids(problem.pages, lengths, at.sequence);
  view.page_tokens = problem.pages.page_tokens;
  return view;
}

struct BiasedScore {
  double score;
  double magnitude;  // b_j of reference::RowFacts::bias_mean
};

/// A function of its own: in line it would be most of every kernel.
__device__ __noinline__ double capped(double score, double softcap) { return softcap * tanh(score / softcap); }

/// What happens to a row's scores between the product and the softmax.
struct RowRules {
  std::int64_t position;  // of the query
  double softcap = 0.0;   // 0: none
  double slope = 0.0;     // ALiBi's

  __device__ RowRules(const Problem& problem, const Sequence& lengths, HeadPosition at, std::int32_t token)
      : position(std::int64_t{lengths.kv_end} - lengths.q_tokens + token), softcap(static_cast<double>(problem.scores.softcap)) {
    if (problem.scores.alibi_slopes != nullptr) slope = static_cast<double>(alibi_slope(problem.scores, at));
  }

  [[nodiscard]] static bool any(const Scores& scores) { return scores.softcap > 0.0F || scores.alibi_slopes != nullptr; }

  __device__ BiasedScore operator()(double score, std::int64_t key) const {
    if (softcap > 0.0) score = capped(score, softcap);
    const double bias = slope * static_cast<double>(llabs(position - key));
    return {score - bias, fabs(score) + fabs(bias)};
  }
};

/// The softmax state of the tokens that one warp has seen; a lane holds every 32nd dim.
template <int kLaneDims>
struct WarpState {
  double m = negative_infinity();
  double l = 0.0;
  double o[kLaneDims] = {};
  double abs_weighted[kLaneDims] = {};
  double squares[kLaneDims] = {};
  double bias_weighted[kLaneDims] = {};
  double bias = 0.0;
  double score_magnitude = 0.0;
  double max_abs_value = 0.0;

  __device__ void rescale(double factor) {
    l *= factor;
    bias *= factor;
    for (int i = 0; i < kLaneDims; ++i) {
      bias_weighted[i] *= factor;
      o[i] *= factor;
      abs_weighted[i] *= factor;
      squares[i] *= factor * factor;
    }
  }

  __device__ void add(double p, double magnitude, const double (&v)[kLaneDims]) {
    l += p;
    bias += p * magnitude;
    for (int i = 0; i < kLaneDims; ++i) {
      const double pv = p * v[i];
      o[i] += pv;
      abs_weighted[i] += fabs(pv);
      squares[i] += pv * pv;
      bias_weighted[i] += magnitude * fabs(pv);
      max_abs_value = fmax(max_abs_value, fabs(v[i]));
    }
  }
};

/// Sums and maxima over the warps of the block.
struct BlockState {
  double m[kWarps];
  double score_magnitude[kWarps];
  double max_abs_value[kWarps];
  double l;
  double bias;
  double o[kMaxDims];
  double abs_weighted[kMaxDims];
  double squares[kMaxDims];
  double bias_weighted[kMaxDims];
};

template <typename TKv, int kLaneDims>
__device__ void see_tokens(WarpState<kLaneDims>& state, const double (&q)[kLaneDims], const HeadView<TKv>& k,
                           const HeadView<TKv>& v, const RowRules& rules, std::int64_t begin, int tokens, int head_dim,
                           int value_dim) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  double scores[kTokens];
  double biases[kTokens];
  double m = state.m;
  for (int t = 0; t < kTokens; ++t) {
    double dot = 0.0;
    double magnitude = 0.0;
    for (int i = 0; i < kLaneDims; ++i) {
      const int dim = lane + i * kWarpThreads;
      const double product = t < tokens && dim < head_dim ? q[i] * k(begin + t, dim) : 0.0;
      dot += product;
      magnitude += fabs(product);
    }
    const BiasedScore biased = rules(warp_sum(dot), begin + t);
    scores[t] = t < tokens ? biased.score : negative_infinity();
    biases[t] = biased.magnitude;
    state.score_magnitude = fmax(state.score_magnitude, warp_sum(magnitude));
    m = fmax(m, scores[t]);
  }
  state.rescale(exp(state.m - m));
  state.m = m;
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tokens) break;
    double values[kLaneDims];
    for (int i = 0; i < kLaneDims; ++i) {
      const int dim = lane + i * kWarpThreads;
      values[i] = dim < value_dim ? v(begin + t, dim) : 0.0;
    }
    state.add(exp(scores[t] - m), biases[t], values);
  }
}

template <int kLaneDims>
__device__ void merge_warps(WarpState<kLaneDims>& state, double sink, BlockState& block) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int dim = static_cast<int>(threadIdx.x); dim < kMaxDims; dim += kThreads) {
    block.o[dim] = block.abs_weighted[dim] = block.squares[dim] = block.bias_weighted[dim] = 0.0;
  }
  const double max_abs_value = warp_max(state.max_abs_value);
  if (threadIdx.x == 0) block.l = block.bias = 0.0;
  if (lane == 0) {
    block.m[warp] = state.m;
    block.score_magnitude[warp] = state.score_magnitude;
    block.max_abs_value[warp] = max_abs_value;
  }
  __syncthreads();
  double m = sink;
  for (const double other : block.m) m = fmax(m, other);
  if (threadIdx.x == 0 && sink != negative_infinity()) atomicAdd(&block.l, exp(sink - m));
  if (state.m != negative_infinity()) {
    state.rescale(exp(state.m - m));
    if (lane == 0) {
      atomicAdd(&block.l, state.l);
      atomicAdd(&block.bias, state.bias);
    }
    for (int i = 0; i < kLaneDims; ++i) {
      atomicAdd(&block.o[lane + i * kWarpThreads], state.o[i]);
      atomicAdd(&block.abs_weighted[lane + i * kWarpThreads], state.abs_weighted[i]);
      atomicAdd(&block.squares[lane + i * kWarpThreads], state.squares[i]);
      atomicAdd(&block.bias_weighted[lane + i * kWarpThreads], state.bias_weighted[i]);
    }
  }
  __syncthreads();
}

__device__ void store(const BlockState& block, double sink, std::int64_t row, std::int64_t visible_tokens, int value_dim,
                      const AnswerView& answer) {
  const double l = block.l;
  for (int dim = static_cast<int>(threadIdx.x); dim < value_dim; dim += kThreads) {
    const std::int64_t element = row * value_dim + dim;
    answer.o[element] = l > 0.0 ? block.o[dim] / l : 0.0;
    answer.abs_weighted[element] = l > 0.0 ? block.abs_weighted[dim] / l : 0.0;
    answer.squares[element] = l > 0.0 ? block.squares[dim] / (l * l) : 0.0;
    if (answer.bias_weighted != nullptr) answer.bias_weighted[element] = l > 0.0 ? block.bias_weighted[dim] / l : 0.0;
  }
  if (threadIdx.x != 0) return;
  double m = sink;
  reference::RowFacts facts{.visible_tokens = visible_tokens, .l = l};
  if (answer.bias_weighted != nullptr && l > 0.0) facts.bias_mean = block.bias / l;
  for (int warp = 0; warp < kWarps; ++warp) {
    m = fmax(m, block.m[warp]);
    facts.score_magnitude = fmax(facts.score_magnitude, block.score_magnitude[warp]);
    facts.max_abs_value = fmax(facts.max_abs_value, block.max_abs_value[warp]);
  }
  answer.lse[row] = l > 0.0 ? m + log(l) : negative_infinity();
  answer.facts[row] = facts;
}

/// q is scaled as it is read: scores and their magnitudes need no factor.
template <typename TQ, typename TKv, int kLaneDims>
__global__ void __launch_bounds__(kThreads) answer_row(const Problem problem, const double scale, const AnswerView answer) {
  __shared__ BlockState block;
  const std::int64_t row = blockIdx.x;  // (sequence, query token, query head), the head running fastest
  const auto head = static_cast<std::int32_t>(row % problem.q_heads);
  const auto token = static_cast<std::int32_t>(row / problem.q_heads % problem.q_tokens);
  const std::int64_t sequence = row / problem.q_heads / problem.q_tokens;
  const Sequence lengths = LengthSource(problem)(sequence);
  const HeadPosition kv_at{sequence, head / (problem.q_heads / problem.kv_heads)};
  const HeadView<TQ> q(problem.q, q_offset(problem.q.strides, lengths, {sequence, head}, false));
  const HeadView<TKv> k = kv_view<TKv>(problem, problem.k, lengths, kv_at);
  const HeadView<TKv> v = kv_view<TKv>(problem, problem.v, lengths, kv_at);
  const KeySpan seen = visible_span(lengths, token, token, reach_of(problem.scores));
  const RowRules rules(problem, lengths, {sequence, head}, token);
  const double sink = problem.scores.sinks != nullptr ? static_cast<double>(problem.scores.sinks[head]) : negative_infinity();

  double q_row[kLaneDims];
  for (int i = 0; i < kLaneDims; ++i) {
    const int dim = static_cast<int>(threadIdx.x) % kWarpThreads + i * kWarpThreads;
    q_row[i] = dim < problem.head_dim ? scale * q(token, dim) : 0.0;
  }
  WarpState<kLaneDims> state;
  for (std::int64_t t = seen.begin + threadIdx.x / kWarpThreads * kTokens; t < seen.end; t += kWarps * kTokens) {
    const auto tokens = static_cast<int>(min(std::int64_t{kTokens}, seen.end - t));
    see_tokens(state, q_row, k, v, rules, t, tokens, problem.head_dim, value_dim_of(problem));
  }
  merge_warps(state, sink, block);
  store(block, sink, row, max(0, seen.end - seen.begin), value_dim_of(problem), answer);
}

struct Release {
  void operator()(void* memory) const noexcept { release(static_cast<std::byte*>(memory)); }
};

/// A device array with the size of a host vector, which it is copied to; null where that is empty.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::vector<T>& host)
      : host_(host),
        memory_(host.empty() ? nullptr : reinterpret_cast<T*>(allocate(static_cast<std::int64_t>(host.size() * sizeof(T))))) {}

  [[nodiscard]] T* data() const { return memory_.get(); }
  void fetch() const {
    if (memory_ != nullptr) copy(host_.data(), memory_.get(), static_cast<std::int64_t>(host_.size() * sizeof(T)));
  }

 private:
  std::vector<T>& host_;
  std::unique_ptr<T, Release> memory_;
};

using Kernel = void (*)(Problem, double, AnswerView);

template <typename TQ, typename TKv>
Kernel kernel_for(std::int32_t widest) {
  if (widest <= 2 * kWarpThreads) return answer_row<TQ, TKv, 2>;
  if (widest <= 4 * kWarpThreads) return answer_row<TQ, TKv, 4>;
  if (widest <= 8 * kWarpThreads) return answer_row<TQ, TKv, 8>;
  static_assert(kMaxDims <= 18 * kWarpThreads);
  return answer_row<TQ, TKv, 18>;
}

/// K and V are of the queries' type, or of one with scales.
Kernel kernel_of(const Problem& problem) {
  Kernel kernel = nullptr;
  const std::int32_t widest = std::max(problem.head_dim, value_dim_of(problem));
  with_query_dtype(problem.q.dtype, [&]<DType kQ>() {
    with_dtype(problem.k.dtype, [&]<DType kKv>() {
      if constexpr (kKv == kQ || traits_of(kKv).scaled) {
        kernel = kernel_for<typename StorageOf<kQ>::type, typename StorageOf<kKv>::type>(widest);
      }
    });
  });
  if (kernel == nullptr) throw GpuError("reference_answer: no such types");
  return kernel;
}

reference::Answer empty_answer(const Problem& problem) {
  reference::Answer answer;
  answer.q_heads = problem.q_heads;
  answer.value_dim = value_dim_of(problem);
  const std::int64_t sequence_rows = std::int64_t{problem.q_tokens} * problem.q_heads;
  for (std::int64_t b = 0; b <= problem.batch; ++b) answer.first_row.push_back(b * sequence_rows);
  const auto rows = static_cast<std::size_t>(answer.rows());
  const std::size_t elements = rows * static_cast<std::size_t>(answer.value_dim);
  answer.o.resize(elements);
  answer.abs_weighted.resize(elements);
  answer.squares.resize(elements);
  if (RowRules::any(problem.scores)) answer.bias_weighted.resize(elements);
  answer.lse.resize(rows);
  answer.facts.resize(rows);
  return answer;
}

}  // namespace

reference::Answer reference_answer(const Problem& problem) {
  reference::Answer answer = empty_answer(problem);
  if (answer.rows() == 0) return answer;
  const DeviceArray o(answer.o);
  const DeviceArray lse(answer.lse);
  const DeviceArray abs_weighted(answer.abs_weighted);
  const DeviceArray squares(answer.squares);
  const DeviceArray bias_weighted(answer.bias_weighted);
  const DeviceArray facts(answer.facts);
  const AnswerView view{o.data(), lse.data(), abs_weighted.data(), squares.data(), bias_weighted.data(), facts.data()};
  const double scale = problem.scores.scale != 0.0F ? static_cast<double>(problem.scores.scale)
                                                    : 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  kernel_of(problem)<<<static_cast<unsigned>(answer.rows()), kThreads>>>(problem, scale, view);
  check(cudaGetLastError(), "answer_row");
  synchronize();
  o.fetch();
  lse.fetch();
  abs_weighted.fetch();
  squares.fetch();
  bias_weighted.fetch();
  facts.fetch();
  return answer;
}

}  // namespace lean::cli::gpu

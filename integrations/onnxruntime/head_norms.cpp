#include "head_norms.hpp"

#include <cmath>

#include "cache.hpp"
#include "gpu.hpp"

namespace lean::ort {
namespace {

void normalise(const NormRows& all, std::int64_t row, std::int64_t head) {
  const std::int64_t from = all.source(row, head);
  const std::int64_t to = (row * all.heads + head) * all.dim;
  float squares = 0.0F;
  for (std::int64_t i = 0; i < all.dim; ++i) {
    const float x = load_number(all.from, all.dtype, from + i);
    squares += x * x;
  }
  const float factor = 1.0F / std::sqrt(squares / static_cast<float>(all.dim) + all.epsilon);
  for (std::int64_t i = 0; i < all.dim; ++i)
    store_number(all.to, all.dtype, to + i, load_number(all.from, all.dtype, from + i) * factor * all.weight[i]);
}

float epsilon_of(const Node& node, const char* name, float otherwise) {
  const float epsilon = node.number(name, otherwise);
  demand(epsilon > 0.0F && std::isfinite(epsilon), name, " = ", epsilon, ": must be finite and more than 0");
  return epsilon;
}

}  // namespace

HeadNorms::HeadNorms(const Node& node, std::size_t q, std::size_t k) : present_(node.has_input(q)), q_index_(q), k_index_(k) {
  demand(node.has_input(k) == present_, "q_norm_weight and k_norm_weight: both or neither");
  const float both = epsilon_of(node, "qk_norm_epsilon", 1e-6F);
  q_epsilon_ = epsilon_of(node, "q_norm_epsilon", both);
  k_epsilon_ = epsilon_of(node, "k_norm_epsilon", both);
  if (!present_) return;
  q_ = FloatsInput(node, q, "q_norm_weight");
  k_ = FloatsInput(node, k, "k_norm_weight");
}

const float* HeadNorms::weight_of(Run& run, const FloatsInput& input, std::size_t index, const char* name, std::int64_t dim) const {
  const Tensor weight = run.input(index);
  demand(weight.shape == Shape{dim}, name, ": shape ", weight.shape, ": must be [", dim, "]");
  return input.of(run, dim);
}

TensorView HeadNorms::normalised(Run& run, const NormRows& given, std::int64_t tokens) const {
  NormRows all = given;
  all.to = run.scratch(static_cast<std::size_t>(all.rows * all.heads * all.dim * bytes_of(all.dtype)));
  if (run.on_gpu()) {
    gpu::normalise(run.stream(), all);
  } else {
    run.parallel(static_cast<std::size_t>(all.rows), [&](std::size_t row) {
      for (std::int64_t head = 0; head < all.heads; ++head) normalise(all, static_cast<std::int64_t>(row), head);
    });
  }
  return {.data = all.to, .dtype = all.dtype, .strides = bshd(tokens, all.heads * all.dim, all.dim)};
}

void HeadNorms::apply(Run& run, std::int64_t rows, std::int64_t tokens, Problem& problem) const {
  if (!present_) return;
  const auto rows_of = [&](const TensorView& view, std::int64_t heads, const float* weight, float epsilon) {
    return NormRows{.from = view.data,
                    .row_stride = view.strides.token,
                    .head_stride = view.strides.head,
                    .dtype = view.dtype,
                    .rows = rows,
                    .heads = heads,
                    .dim = problem.head_dim,
                    .weight = weight,
                    .epsilon = epsilon};
  };
  const float* const q_weight = weight_of(run, q_, q_index_, "q_norm_weight", problem.head_dim);
  const float* const k_weight = weight_of(run, k_, k_index_, "k_norm_weight", problem.head_dim);
  problem.q = normalised(run, rows_of(problem.q, problem.q_heads, q_weight, q_epsilon_), tokens);
  problem.append.k = normalised(run, rows_of(problem.append.k, problem.kv_heads, k_weight, k_epsilon_), tokens);
}

}  // namespace lean::ort

#include "grouped.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "cache.hpp"

namespace lean::ort {
namespace {

/// The attribute's default is -1 in ONNX Runtime's schema; 1 alone turns it on.
bool is_smooth(const Node& node) {
  const std::int64_t value = node.integer("smooth_softmax", -1);
  demand(value >= -1 && value <= 1, "smooth_softmax = ", value, ": allowed -1, 0 (off), 1");
  return value == 1;
}

}  // namespace

Grouped::Grouped(const Node& node, const GroupedInputs& inputs)
    : in_(inputs),
      q_heads_(node.integer("num_heads", 0)),
      kv_heads_(node.integer("kv_num_heads", 0)),
      scale_(node.number("scale", 0.0F)),
      softcap_(node.number("softcap", 0.0F)),
      window_(node.integer("local_window_size", -1)),
      causal_(node.flag(inputs.causal_name, true)),
      rotates_(node.flag("do_rotary", false)),
      has_sink_(node.has_input(inputs.sink)),
      norms_(node, inputs.q_norm, inputs.k_norm) {
  check_heads(node);
  check_cache(node);
  if (rotates_) tables_ = Rotary(node, in_.cos, in_.sin, node.flag("rotary_interleaved", false));
  if (has_sink_) {
    sink_ = FloatsInput(node, in_.sink, "head_sink");
  } else if (is_smooth(node)) {
    zero_sinks_ = keep(node, std::vector<float>(static_cast<std::size_t>(q_heads_), 0.0F));
  }
}

void Grouped::check_heads(const Node& node) const {
  demand(q_heads_ > 0 && q_heads_ <= INT32_MAX, "num_heads = ", q_heads_, ": allowed 1 to 2147483647");
  demand(kv_heads_ > 0 && q_heads_ % kv_heads_ == 0, "kv_num_heads = ", kv_heads_, ": must divide num_heads = ", q_heads_);
  demand(window_ == -1 || window_ > 0, "local_window_size = ", window_, ": allowed -1 (all) or more than 0");
  demand(!rotates_ || (node.has_input(in_.cos) && node.has_input(in_.sin)), "do_rotary = 1: needs cos_cache and sin_cache");
  demand(node.has_input(in_.key) == node.has_input(in_.value), "key and value: both, or neither with a packed query");
}

void Grouped::check_cache(const Node& node) const {
  const auto type = node.computed_type(in_.query, "query");
  const auto cache_type = node.has_input(in_.k_cache) ? node.input_type(in_.k_cache) : type;
  const bool quantised = cache_type != type;
  do_not(quantised && cache_type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, in_.k_cache_name, ": is ", cache_type,
         ": allowed the type of query, or float8e4m3fn");
  do_not(quantised && !node.infers(), in_.k_cache_name, ": is ", cache_type, ": allowed with ONNX Runtime 1.28 and newer");
  demand(!node.has_input(in_.v_cache) || node.input_type(in_.v_cache) == cache_type, in_.v_cache_name, ": is ",
         node.has_input(in_.v_cache) ? node.input_type(in_.v_cache) : type, ": must be ", cache_type, " as ", in_.k_cache_name);
  for (const auto& [attribute, name, scale] :
       {std::tuple("k_quant_type", "k_scale", in_.k_scale), std::tuple("v_quant_type", "v_scale", in_.v_scale)}) {
    const std::string granularity = node.string(attribute, "NONE");
    do_not(granularity != (quantised ? "PER_TENSOR" : "NONE"), attribute, " = \"", granularity,
           "\": allowed \"NONE\" with a cache of the type of query, \"PER_TENSOR\" with a float8e4m3fn cache");
    demand(node.has_input(scale) == quantised, name, ": goes with a float8e4m3fn cache and with no other");
  }
}

std::int64_t Grouped::head_dim_of(std::int64_t width, bool packed) const {
  const std::int64_t heads_in_row = q_heads_ + (packed ? 2 * kv_heads_ : 0);
  demand(width > 0 && width % heads_in_row == 0, "query: width ", width, ": must be a multiple of ", heads_in_row,
         packed ? " heads (packed q, k and v)" : " heads");
  return width / heads_in_row;
}

void Grouped::check_key_and_value(const Run& run, const Tensor& query, const Shape& wanted) const {
  for (const auto& [name, i] : {std::pair("key", in_.key), std::pair("value", in_.value)}) {
    const Tensor rows = run.input(i);
    if (!rows) continue;
    demand(rows.shape == wanted, name, ": shape ", rows.shape, ": must be ", wanted);
    demand(rows.type == query.type, name, ": is ", rows.type, ": must be ", query.type, " as query");
  }
}

void Grouped::set_new_tokens(Run& run, std::int64_t tokens, Problem& problem) const {
  const Tensor query = run.input(in_.query);
  const Tensor key = run.input(in_.key);
  const DType dtype = dtype_of(query.type, "query");
  const std::int64_t dim = problem.head_dim;
  problem.q = {.data = query.data, .dtype = dtype, .strides = bshd(tokens, query.shape.back(), dim)};
  if (!key) {
    problem.append.k = from_element(problem.q, q_heads_ * dim);
    problem.append.v = from_element(problem.append.k, kv_heads_ * dim);
  } else {
    const Strides rows = bshd(tokens, kv_heads_ * dim, dim);
    problem.append.k = {.data = key.data, .dtype = dtype, .strides = rows};
    problem.append.v = {.data = run.input(in_.value).data, .dtype = dtype, .strides = rows};
  }
  norms_.apply(run, query.elements() / std::max<std::int64_t>(1, query.shape.back()), tokens, problem);
}

void Grouped::set_scales(const Run& run, Problem& problem) const {
  if (bytes_of(problem.k.dtype) != 1) return;
  for (const auto& [scales, name, index] :
       {std::tuple(&problem.k_scales, "k_scale", in_.k_scale), std::tuple(&problem.v_scales, "v_scale", in_.v_scale)}) {
    const Tensor scale = run.input(index);
    demand(scale.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && scale.elements() == 1, name, ": is ", scale.type, " ", scale.shape,
           ": must be one float32");
    *scales = scale.as<float>();
  }
}

void Grouped::set_scores(Run& run, Problem& problem) const {
  problem.scores.scale = scale_;
  problem.scores.softcap = softcap_;
  problem.scores.causal = causal_;
  if (window_ > 0) problem.scores.window_left = static_cast<std::int32_t>(std::min<std::int64_t>(window_, INT32_MAX) - 1);
  problem.scores.sinks = zero_sinks_.get();
  if (!has_sink_) return;
  const Tensor sink = run.input(in_.sink);
  demand(sink.shape == Shape{q_heads_}, "head_sink: shape ", sink.shape, ": must be [", q_heads_, "]");
  problem.scores.sinks = sink_.of(run, q_heads_);
}

void Grouped::set_rotary(Run& run, std::int64_t tokens, Problem& problem) const {
  if (rotates_) tables_.set(run, tokens, problem);
}

}  // namespace lean::ort

// GroupQueryAttention of com.microsoft: new keys and values go into a cache [B, Hkv, capacity, d], rotated on the way, and the new
// queries attend to it, in one call of the library. Of the S rows that each sequence brings, the first Q_b are tokens and the rest
// padding; T_b = seqlens_k[b] + 1 tokens are in its cache after the call, P_b = T_b - Q_b before it.
#include <algorithm>
#include <cmath>
#include <optional>

#include "cache.hpp"
#include "op.hpp"
#include "ops.hpp"
#include "rotary.hpp"

namespace lean::ort {
namespace {

enum In : std::size_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kSeqlensK,
  kTotal,
  kCos,
  kSin,
  kPositionIds,
  kBias,
  kHeadSink,
  kKScale,
  kVScale,
  kQNorm,
  kKNorm,
  kQuerySeqlens,
};
enum Out : std::size_t { kOutput, kPresentKey, kPresentValue, kOutputQk };

/// What a run asks, once its inputs are read and found to fit each other.
struct Sizes {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;    // S
  std::int64_t head_dim = 0;  // d
  std::int64_t past_capacity = 0;
  std::int64_t capacity = 0;  // of the cache after the call
  std::int64_t width = 0;     // of a row of query
  bool packed = false;        // key and value stand behind query in the same rows

  std::vector<std::int32_t> totals{};      // T_b
  std::vector<std::int64_t> new_tokens{};  // Q_b
  std::vector<std::int64_t> past{};        // P_b
};

class GroupQueryAttention {
 public:
  static constexpr const char* kName = "GroupQueryAttention";
  static constexpr Port kInputs[] = {
      {"query"},
      {"key", true},
      {"value", true},
      {"past_key", true},
      {"past_value", true},
      {"seqlens_k"},
      {"total_sequence_length", false, true},
      {"cos_cache", true},
      {"sin_cache", true},
      {"position_ids", true},
      {"attention_bias", true},
      {"head_sink", true},
      {"k_scale", true},
      {"v_scale", true},
      {"q_norm_weight", true},
      {"k_norm_weight", true},
      {"query_seqlens", true},
  };
  static constexpr Port kOutputs[] = {{"output"}, {"present_key", true}, {"present_value", true}, {"output_qk", true}};

  static void infer(const Inference& inference);
  explicit GroupQueryAttention(const Node& node);
  void compute(Run& run) const;

 private:
  void check_node(const Node& node) const;
  [[nodiscard]] Sizes sizes_of(const Run& run, const Tensor& query) const;
  void read_lengths(const Run& run, Sizes& sizes) const;
  void check_positions(const Run& run, const Sizes& sizes) const;
  void set_rotary(Run& run, const Sizes& sizes, Append& append) const;
  void set_scores(const Run& run, const Sizes& sizes, Scores& scores, std::vector<float>& sinks) const;
  void set_new_tokens(const Run& run, const Sizes& sizes, const Tensor& query, Problem& problem) const;
  void set_cache(Run& run, const Sizes& sizes, Problem& problem) const;
  void decode_each(Run& run, const Sizes& sizes, const Problem& problem) const;

  std::int64_t q_heads_;
  std::int64_t kv_heads_;
  float scale_;
  float softcap_;
  std::int64_t window_;
  bool causal_;
  bool rotary_;
  bool smooth_softmax_;
  Rotary tables_;
};

void GroupQueryAttention::infer(const Inference& inference) {
  const auto query = inference.input(kQuery).of_rank(3);
  const std::int64_t q_heads = inference.integer("num_heads", 0);
  const std::int64_t kv_heads = inference.integer("kv_num_heads", 0);
  const bool packed = !inference.input(kKey);
  const Dim head_dim = query.dims[2] / (q_heads + (packed ? 2 * kv_heads : 0));
  inference.set_output(kOutput, query.type, {query.dims[0], query.dims[1], packed ? head_dim * q_heads : query.dims[2]});
  const auto past = inference.input(kPastKey);
  const std::vector<Dim> cache{query.dims[0], {kv_heads}, {}, head_dim};
  inference.set_output(kPresentKey, past ? past.type : query.type, cache);
  inference.set_output(kPresentValue, past ? past.type : query.type, cache);
}

GroupQueryAttention::GroupQueryAttention(const Node& node)
    : q_heads_(node.integer("num_heads", 0)),
      kv_heads_(node.integer("kv_num_heads", 0)),
      scale_(node.number("scale", 0.0F)),
      softcap_(node.number("softcap", 0.0F)),
      window_(node.integer("local_window_size", -1)),
      causal_(node.integer("causal", 1) != 0),
      rotary_(node.integer("do_rotary", 0) != 0),
      smooth_softmax_(node.integer("smooth_softmax", 0) != 0) {
  check_node(node);
  if (rotary_) tables_ = Rotary(node, kCos, kSin, node.integer("rotary_interleaved", 0) != 0);
}

void GroupQueryAttention::check_node(const Node& node) const {
  demand(q_heads_ > 0 && q_heads_ <= INT32_MAX, "num_heads = ", q_heads_, ": allowed 1 to 2147483647");
  demand(kv_heads_ > 0 && q_heads_ % kv_heads_ == 0, "kv_num_heads = ", kv_heads_, ": must divide num_heads = ", q_heads_);
  demand(window_ == -1 || window_ > 0, "local_window_size = ", window_, ": allowed -1 (all) or more than 0");
  demand(causal_ || window_ == -1, "local_window_size = ", window_, ": must be -1 with causal = 0");
  do_not(node.integer("qk_output", 0) != 0 || node.has_output(kOutputQk),
         "qk_output: scores are not given out, leave output_qk away");
  do_not(node.integer("sliding_window_cache", 0) != 0,
         "sliding_window_cache = 1: the cache is as long as the sequence here; local_window_size does the same on that");
  do_not(node.integer("kv_cache_bit_width", 0) != 0,
         "kv_cache_bit_width: int8 and int4 caches are not read; a float8e4m3fn cache is");
  do_not(node.has_input(kQNorm) || node.has_input(kKNorm),
         "q_norm_weight, k_norm_weight: not applied here; leave SimplifiedLayerNormalization in front of the node");
  demand(!rotary_ || (node.has_input(kCos) && node.has_input(kSin)), "do_rotary = 1: needs cos_cache and sin_cache");
  demand(node.has_input(kKey) == node.has_input(kValue), "key and value: both, or neither with a packed query");
  demand(node.has_input(kPastKey) == node.has_input(kPastValue), "past_key and past_value: both or neither");
  const auto type = node.input_type(kQuery);
  const DType dtype = dtype_of(type, "query");
  do_not(bytes_of(dtype) == 1, "query: is ", type, ": allowed float32, float16, bfloat16");
  const auto cache_type = node.has_input(kPastKey) ? node.input_type(kPastKey) : type;
  const bool quantised = cache_type != type;
  do_not(quantised && cache_type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, "past_key: is ", cache_type,
         ": allowed the type of query, or float8e4m3fn");
  for (const auto& [attribute, scale] : {std::pair("k_quant_type", kKScale), std::pair("v_quant_type", kVScale)}) {
    const std::string granularity = node.string(attribute, "NONE");
    do_not(granularity != (quantised ? "PER_TENSOR" : "NONE"), attribute, " = \"", granularity,
           "\": allowed \"NONE\" with a cache of the type of query, \"PER_TENSOR\" with a float8e4m3fn cache");
    demand(node.has_input(scale) == quantised, kInputs[scale].name, ": goes with a float8e4m3fn cache and with no other");
  }
}

Sizes GroupQueryAttention::sizes_of(const Run& run, const Tensor& query) const {
  demand(query.shape.size() == 3, "query: shape ", query.shape, ": must be [B, S, width]");
  const Tensor key = run.input(kKey);
  Sizes sizes{.batch = query.shape[0], .tokens = query.shape[1], .width = query.shape[2], .packed = !key};
  const std::int64_t heads_in_row = q_heads_ + (sizes.packed ? 2 * kv_heads_ : 0);
  demand(sizes.width > 0 && sizes.width % heads_in_row == 0, "query: width ", sizes.width, ": must be a multiple of ", heads_in_row,
         sizes.packed ? " heads (packed q, k and v)" : " heads");
  sizes.head_dim = sizes.width / heads_in_row;
  const Shape new_shape{sizes.batch, sizes.tokens, kv_heads_ * sizes.head_dim};
  for (const std::size_t i : {kKey, kValue}) {
    if (sizes.packed) break;
    const Tensor rows = run.input(i);
    demand(rows.shape == new_shape, kInputs[i].name, ": shape ", rows.shape, ": must be ", new_shape);
    demand(rows.type == query.type, kInputs[i].name, ": is ", rows.type, ": must be ", query.type, " as query");
  }
  const Tensor total = run.input(kTotal);
  demand(total.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && total.elements() == 1, "total_sequence_length: must be one int32");
  const std::int64_t most = *total.as<std::int32_t>();
  demand(most >= sizes.tokens && most > 0, "total_sequence_length = ", most, ": must be at least the ", sizes.tokens,
         " tokens of query");
  const Tensor past = run.input(kPastKey);
  if (past) {
    demand(past.shape.size() == 4, "past_key: shape ", past.shape, ": must be [B, Hkv, capacity, d]");
    const Shape wanted{sizes.batch, kv_heads_, past.shape[2], sizes.head_dim};
    for (const std::size_t i : {kPastKey, kPastValue}) {
      const Tensor given = run.input(i);
      demand(given.shape == wanted, kInputs[i].name, ": shape ", given.shape, ": must be ", wanted);
      demand(given.type == past.type, kInputs[i].name, ": is ", given.type, ": must be ", past.type, " as past_key");
    }
    sizes.past_capacity = past.shape[2];
  }
  sizes.capacity = std::max(most, sizes.past_capacity);
  demand(sizes.capacity <= INT32_MAX && sizes.tokens <= INT32_MAX, "past_key: ", sizes.capacity,
         " tokens: allowed up to 2147483647");
  read_lengths(run, sizes);
  return sizes;
}

void GroupQueryAttention::read_lengths(const Run& run, Sizes& sizes) const {
  const Tensor lengths = run.input(kSeqlensK);
  demand(lengths.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && lengths.elements() == sizes.batch, "seqlens_k: is ", lengths.type,
         " ", lengths.shape, ": must be int32 [", sizes.batch, "]");
  const Tensor rows = run.input(kQuerySeqlens);
  if (rows)
    demand(rows.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && rows.elements() == sizes.batch, "query_seqlens: is ", rows.type, " ",
           rows.shape, ": must be int32 [", sizes.batch, "]");
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const std::int64_t total = std::int64_t{lengths.as<std::int32_t>()[b]} + 1;
    demand(total > 0 && total <= sizes.capacity, "seqlens_k[", b, "] = ", total - 1, ": allowed 0 to ", sizes.capacity - 1,
           ", one below the tokens that the cache holds");
    const std::int64_t most = std::min(sizes.tokens, total);
    const std::int64_t tokens = rows ? rows.as<std::int32_t>()[b] : most;
    demand(tokens >= 0 && tokens <= most, "query_seqlens[", b, "] = ", tokens, ": allowed 0 to ", most);
    demand(total - tokens <= sizes.past_capacity, "seqlens_k[", b, "] = ", total - 1, ": says ", total - tokens,
           " tokens before this step, and past_key holds ", sizes.past_capacity);
    sizes.totals.push_back(static_cast<std::int32_t>(total));
    sizes.new_tokens.push_back(tokens);
    sizes.past.push_back(total - tokens);
  }
}

void GroupQueryAttention::check_positions(const Run& run, const Sizes& sizes) const {
  const Tensor ids = run.input(kPositionIds);
  if (!ids || !rotary_) return;
  demand(ids.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 && ids.elements() == sizes.batch * sizes.tokens, "position_ids: is ",
         ids.type, " ", ids.shape, ": must be int64 [", sizes.batch, ", ", sizes.tokens, "]");
  for (std::int64_t b = 0; b < sizes.batch; ++b)
    for (std::int64_t i = 0; i < sizes.new_tokens[static_cast<std::size_t>(b)]; ++i) {
      const std::int64_t given = ids.as<std::int64_t>()[b * sizes.tokens + i];
      const std::int64_t place = sizes.past[static_cast<std::size_t>(b)] + i;
      do_not(given != place, "position_ids[", b, "][", i, "] = ", given, ": a token is rotated by its place in the cache, here ",
             place);
    }
}

void GroupQueryAttention::set_rotary(Run& run, const Sizes& sizes, Append& append) const {
  if (!rotary_) return;
  check_positions(run, sizes);
  tables_.set(run, *std::max_element(sizes.totals.begin(), sizes.totals.end()), sizes.head_dim, append);
}

void GroupQueryAttention::set_scores(const Run& run, const Sizes& sizes, Scores& scores, std::vector<float>& sinks) const {
  scores.scale = scale_;
  scores.softcap = softcap_;
  scores.causal = causal_;
  if (window_ > 0) scores.window_left = static_cast<std::int32_t>(std::min<std::int64_t>(window_, INT32_MAX) - 1);
  if (const Tensor sink = run.input(kHeadSink)) {
    demand(sink.shape == Shape{q_heads_}, "head_sink: shape ", sink.shape, ": must be [", q_heads_, "]");
    sinks = to_floats(sink, "head_sink");
  } else if (smooth_softmax_) {
    sinks.assign(static_cast<std::size_t>(q_heads_), 0.0F);
  }
  if (!sinks.empty()) scores.sinks = sinks.data();
  const Tensor bias = run.input(kBias);
  if (!bias) return;
  const std::int64_t longest = *std::max_element(sizes.totals.begin(), sizes.totals.end());
  const Shape& shape = bias.shape;
  demand(shape.size() == 4 && (shape[0] == 1 || shape[0] == sizes.batch) && (shape[1] == 1 || shape[1] == q_heads_) &&
             shape[2] == sizes.tokens && shape[3] >= longest,
         "attention_bias: shape ", shape, ": must be [", sizes.batch, " or 1, ", q_heads_, " or 1, ", sizes.tokens, ", ", longest,
         " or more]");
  scores.mask = bias.data;
  scores.mask_dtype = dtype_of(bias.type, "attention_bias");
  scores.mask_strides = bhsd(shape[1], shape[2], shape[3]);
  if (shape[0] == 1) scores.mask_strides.sequence = 0;
  if (shape[1] == 1) scores.mask_strides.head = 0;
}

void GroupQueryAttention::set_new_tokens(const Run& run, const Sizes& sizes, const Tensor& query, Problem& problem) const {
  const DType dtype = dtype_of(query.type, "query");
  const Strides rows = bshd(sizes.tokens, sizes.width, sizes.head_dim);
  problem.q = {.data = query.data, .dtype = dtype, .strides = rows};
  if (sizes.packed) {
    problem.append.k = from_element(problem.q, q_heads_ * sizes.head_dim);
    problem.append.v = from_element(problem.append.k, kv_heads_ * sizes.head_dim);
    return;
  }
  const Strides kv_rows = bshd(sizes.tokens, kv_heads_ * sizes.head_dim, sizes.head_dim);
  problem.append.k = {.data = run.input(kKey).data, .dtype = dtype, .strides = kv_rows};
  problem.append.v = {.data = run.input(kValue).data, .dtype = dtype, .strides = kv_rows};
}

/// The cache that the call writes to: present, or memory of the run's own where nobody asks for present. What was in past is there
/// afterwards, without a copy when both are the same buffer.
void GroupQueryAttention::set_cache(Run& run, const Sizes& sizes, Problem& problem) const {
  const Shape shape{sizes.batch, kv_heads_, sizes.capacity, sizes.head_dim};
  const Strides strides = bhsd(kv_heads_, sizes.capacity, sizes.head_dim);
  const Extent extent{sizes.batch, kv_heads_, sizes.head_dim};
  for (const auto& [view, past_index, present_index] :
       {std::tuple(&problem.k, kPastKey, kPresentKey), std::tuple(&problem.v, kPastValue, kPresentValue)}) {
    const Tensor past = run.input(past_index);
    const Tensor present = run.output(present_index, shape);
    const DType dtype = past ? dtype_of(past.type, "past_key") : problem.q.dtype;
    const auto bytes = static_cast<std::size_t>(sizes.batch * strides.sequence * bytes_of(dtype));
    *view = {.data = present ? present.data : run.scratch(bytes), .dtype = dtype, .strides = strides};
    if (past.data == view->data) continue;
    const Strides past_strides = bhsd(kv_heads_, sizes.past_capacity, sizes.head_dim);
    if (past) copy_tokens(run, {.data = past.data, .dtype = dtype, .strides = past_strides}, *view, extent, sizes.past);
    zero_tokens(run, *view, extent, {sizes.totals.begin(), sizes.totals.end()}, sizes.capacity);
  }
  if (bytes_of(problem.k.dtype) != 1) return;
  for (const auto& [scales, index] : {std::pair(&problem.k_scales, kKScale), std::pair(&problem.v_scales, kVScale)}) {
    const Tensor scale = run.input(index);
    demand(scale.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && scale.elements() == 1, kInputs[index].name, ": is ", scale.type,
           " ", scale.shape, ": must be one float32");
    *scales = scale.as<float>();
  }
}

/// A batch whose sequences bring different numbers of tokens: one call each. Rows of padding are 0.
void GroupQueryAttention::decode_each(Run& run, const Sizes& sizes, const Problem& problem) const {
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    Problem one = problem;
    one.batch = 1;
    one.q_tokens = static_cast<std::int32_t>(sizes.new_tokens[at]);
    one.kv_lengths = &sizes.totals[at];
    for (TensorView* view : {&one.q, &one.k, &one.v, &one.append.k, &one.append.v}) *view = from_sequence(*view, b);
    const TensorView rows = from_sequence({.data = problem.o.data, .dtype = problem.o.dtype, .strides = problem.o.strides}, b);
    one.o.data = const_cast<void*>(rows.data);
    if (problem.scores.mask != nullptr)
      one.scores.mask = from_sequence({problem.scores.mask, problem.scores.mask_dtype, problem.scores.mask_strides}, b).data;
    if (one.q_tokens > 0) run.decode(one);
    zero_tokens(run, rows, {1, q_heads_, sizes.head_dim}, {sizes.new_tokens[at]}, sizes.tokens);
  }
}

void GroupQueryAttention::compute(Run& run) const {
  const Tensor query = run.input(kQuery);
  const Sizes sizes = sizes_of(run, query);
  const Tensor output = run.output(kOutput, {sizes.batch, sizes.tokens, q_heads_ * sizes.head_dim});
  Problem problem{.batch = sizes.batch,
                  .q_heads = static_cast<std::int32_t>(q_heads_),
                  .kv_heads = static_cast<std::int32_t>(kv_heads_),
                  .head_dim = static_cast<std::int32_t>(sizes.head_dim),
                  .q_tokens = static_cast<std::int32_t>(sizes.tokens),
                  .kv_capacity = static_cast<std::int32_t>(sizes.capacity),
                  .kv_lengths = sizes.totals.data()};
  set_new_tokens(run, sizes, query, problem);
  problem.o = {
      .data = output.data, .dtype = problem.q.dtype, .strides = bshd(sizes.tokens, q_heads_ * sizes.head_dim, sizes.head_dim)};
  if (sizes.batch == 0) {
    set_cache(run, sizes, problem);
    return;
  }
  std::vector<float> sinks;
  set_rotary(run, sizes, problem.append);
  set_scores(run, sizes, problem.scores, sinks);
  set_cache(run, sizes, problem);
  const bool even =
      std::all_of(sizes.new_tokens.begin(), sizes.new_tokens.end(), [&](std::int64_t n) { return n == sizes.tokens; });
  if (even && sizes.tokens > 0)
    run.decode(problem);
  else
    decode_each(run, sizes, problem);
}

}  // namespace

const OrtCustomOp& group_query_attention() { return op<GroupQueryAttention>(); }

}  // namespace lean::ort

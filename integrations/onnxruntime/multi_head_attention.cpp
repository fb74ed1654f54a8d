// MultiHeadAttention of com.microsoft, with past keys and values or without.
#include "attend.hpp"
#include "gpu.hpp"
#include "op.hpp"
#include "ops.hpp"

namespace lean::ort {
namespace {

enum In : std::size_t {
  kQuery,
  kKey,
  kValue,
  kBias,
  kKeyPaddingMask,
  kAttentionBias,
  kPastKey,
  kPastValue,
  kPastLength,
  kCacheIndirection,
};
enum Out : std::size_t { kOutput, kPresentKey, kPresentValue, kQk };

/// The default of mask_filter_value, which is added to the scores of hidden keys: e to this power is 0 in fp32.
constexpr float kMostFilter = -10000.0F;

class MultiHeadAttention {
 public:
  static constexpr const char* kName = "MultiHeadAttention";
  static constexpr Port kInputs[] = {{"query"},
                                     {"key", true},
                                     {"value", true},
                                     {"bias", true},
                                     {"key_padding_mask", true},
                                     {"attention_bias", true},
                                     {"past_key", true},
                                     {"past_value", true},
                                     {"past_sequence_length", true},
                                     {"cache_indirection", true}};
  static constexpr Port kOutputs[] = {{"output"}, {"present_key", true}, {"present_value", true}, {"qk", true}};

  static void infer(const Inference& inference);
  explicit MultiHeadAttention(const Node& node);
  void compute(Run& run) const;

 private:
  [[nodiscard]] Attend sizes_of(const Run& run) const;
  void set_packed(const Tensor& tensor, std::int64_t parts, Attend& call) const;
  void set_key_and_value(const Run& run, Attend& call) const;
  void set_past(const Run& run, Attend& call) const;
  void set_mask(Run& run, Attend& call) const;

  std::int64_t heads_;
  float scale_;
  bool causal_;
};

void MultiHeadAttention::infer(const Inference& inference) {
  const std::int64_t heads = inference.integer("num_heads", 0);
  const auto query = inference.input(kQuery);
  const auto value = inference.input(kValue);
  const bool packed = query.dims.size() == 5;
  const auto q = query.of_rank(packed ? 5 : 3);
  Dim value_dim = packed ? q.dims[4] : Dim{};
  if (value.dims.size() == 3) value_dim = value.dims[2] / heads;
  if (value.dims.size() == 4) value_dim = value.dims[3];
  const Dim head_dim = packed ? q.dims[4] : q.dims[2] / heads;
  if (!packed && value.dims.empty()) value_dim = head_dim;
  inference.set_output(kOutput, q.type, {q.dims[0], q.dims[1], value_dim * heads});
  inference.set_output(kPresentKey, q.type, {q.dims[0], {heads}, {}, head_dim});
  inference.set_output(kPresentValue, q.type, {q.dims[0], {heads}, {}, value_dim});
}

MultiHeadAttention::MultiHeadAttention(const Node& node)
    : heads_(node.integer("num_heads", 0)), scale_(node.number("scale", 0.0F)), causal_(node.flag("unidirectional", false)) {
  demand(heads_ > 0 && heads_ <= INT32_MAX, "num_heads = ", heads_, ": allowed 1 to 2147483647");
  do_not(node.has_input(kBias), "bias: is not added here; add it in front of the node");
  do_not(node.has_input(kPastLength),
         "past_sequence_length: a buffer for past and present is not shared by this operator; "
         "GroupQueryAttention does that");
  do_not(node.has_input(kCacheIndirection), "cache_indirection: beams are not followed here; reorder past_key and past_value");
  const float filter = node.number("mask_filter_value", kMostFilter);
  do_not(
      node.has_input(kKeyPaddingMask) && !(filter <= kMostFilter), "mask_filter_value = ", filter,
      ": a key that key_padding_mask hides weighs nothing here: allowed -10000 and less, or put the numbers into attention_bias");
  do_not(node.has_output(kQk), "qk: scores are not given out, leave the output away");
  demand(node.has_input(kPastKey) == node.has_input(kPastValue), "past_key and past_value: both or neither");
  demand(!node.has_input(kValue) || node.has_input(kKey), "value: goes with key");
  const auto type = node.computed_type(kQuery, "query");
  for (const std::size_t i : {kKey, kValue, kPastKey, kPastValue})
    if (node.has_input(i))
      do_not(node.input_type(i) != type, kInputs[i].name, ": is ", node.input_type(i), ": must be ", type, " as query");
}

/// [B, tokens, heads, parts, d]: q, k and v, or k and v, of a head side by side.
void MultiHeadAttention::set_packed(const Tensor& tensor, std::int64_t parts, Attend& call) const {
  const char* const name = parts == 3 ? "query" : "key";
  demand(tensor.shape.size() == 5 && tensor.shape[0] == call.batch && tensor.shape[2] == heads_ && tensor.shape[3] == parts, name,
         ": shape ", tensor.shape, ": must be [B, tokens, ", heads_, ", ", parts, ", d]");
  const std::int64_t dim = tensor.shape[4];
  call.head_dim = call.value_dim = dim;
  call.new_tokens = tensor.shape[1];
  const Strides strides = bshd(tensor.shape[1], heads_ * parts * dim, parts * dim);
  const TensorView first{.data = tensor.data, .dtype = dtype_of(tensor.type, name), .strides = strides};
  call.v = from_element(first, (parts - 1) * dim);
  call.k = from_element(first, (parts - 2) * dim);
  if (parts == 3) call.q = first;
}

void MultiHeadAttention::set_key_and_value(const Run& run, Attend& call) const {
  const Tensor key = run.input(kKey);
  const Tensor value = run.input(kValue);
  if (!value) return set_packed(key, 2, call);
  const bool split = key.shape.size() == 4;  // [B, heads, tokens, d]
  demand((split || key.shape.size() == 3) && value.shape.size() == key.shape.size() && key.shape[0] == call.batch &&
             value.shape[0] == call.batch,
         "key ", key.shape, ", value ", value.shape, ": must both be [", call.batch, ", tokens, width] or [", call.batch, ", ",
         heads_, ", tokens, d]");
  call.new_tokens = key.shape[split ? 2 : 1];
  call.value_dim = split ? value.shape[3] : value.shape[2] / heads_;
  const Shape key_shape = split ? Shape{call.batch, heads_, call.new_tokens, call.head_dim}
                                : Shape{call.batch, call.new_tokens, heads_ * call.head_dim};
  const Shape value_shape = split ? Shape{call.batch, heads_, call.new_tokens, call.value_dim}
                                  : Shape{call.batch, call.new_tokens, heads_ * call.value_dim};
  demand(key.shape == key_shape, "key: shape ", key.shape, ": must be ", key_shape);
  demand(value.shape == value_shape, "value: shape ", value.shape, ": must be ", value_shape);
  const auto view = [&](const Tensor& tensor, std::int64_t dim) {
    return TensorView{.data = tensor.data,
                      .dtype = call.q.dtype,
                      .strides = split ? bhsd(heads_, call.new_tokens, dim) : bshd(call.new_tokens, heads_ * dim, dim)};
  };
  call.k = view(key, call.head_dim);
  call.v = view(value, call.value_dim);
}

Attend MultiHeadAttention::sizes_of(const Run& run) const {
  const Tensor query = run.input(kQuery);
  const bool packed = !run.input(kKey);
  demand(query.shape.size() == (packed ? 5U : 3U), "query: shape ", query.shape, ": must be [B, S, width], or [B, S, ", heads_,
         ", 3, d] without key");
  Attend call{.batch = query.shape[0], .q_heads = heads_, .kv_heads = heads_, .queries = query.shape[1]};
  if (packed) {
    set_packed(query, 3, call);
  } else {
    demand(query.shape[2] % heads_ == 0, "query: width ", query.shape[2], ": must be a multiple of ", heads_, " heads");
    call.head_dim = query.shape[2] / heads_;
    call.q = {
        .data = query.data, .dtype = dtype_of(query.type, "query"), .strides = bshd(call.queries, query.shape[2], call.head_dim)};
    set_key_and_value(run, call);
  }
  demand(call.head_dim > 0 && call.value_dim > 0, "query: shape ", query.shape, ": heads must not be empty");
  return call;
}

void MultiHeadAttention::set_past(const Run& run, Attend& call) const {
  const Tensor past = run.input(kPastKey);
  if (!past) return;
  demand(past.shape.size() == 4, "past_key: shape ", past.shape, ": must be [B, heads, tokens, d]");
  call.past_tokens = past.shape[2];
  for (const auto& [view, i, dim] :
       {std::tuple(&call.past_k, kPastKey, call.head_dim), std::tuple(&call.past_v, kPastValue, call.value_dim)}) {
    const Tensor given = run.input(i);
    const Shape wanted{call.batch, heads_, call.past_tokens, dim};
    demand(given.shape == wanted, kInputs[i].name, ": shape ", given.shape, ": must be ", wanted);
    *view = {.data = given.data, .dtype = call.q.dtype, .strides = bhsd(heads_, call.past_tokens, dim)};
  }
}

/// key_padding_mask and attention_bias as one mask: boolean where there is no bias.
void MultiHeadAttention::set_mask(Run& run, Attend& call) const {
  const std::int64_t keys = call.past_tokens + call.new_tokens;
  const Tensor bias = run.input(kAttentionBias);
  call.mask = broadcast_mask(bias, "attention_bias", call.batch, heads_, call.queries);
  demand(!bias || call.mask.keys == keys, "attention_bias: shape ", bias.shape, ": there are ", keys, " keys");
  const Tensor padding = run.input(kKeyPaddingMask);
  if (!padding) return;
  demand(padding.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "key_padding_mask: is ", padding.type, ": must be int32");
  const bool lengths = padding.shape == Shape{call.batch};
  const bool rows = padding.shape == Shape{call.batch, call.queries, keys};
  do_not(!lengths && !rows && padding.shape != Shape{call.batch, keys}, "key_padding_mask: shape ", padding.shape, ": allowed [",
         call.batch, "], [", call.batch, ", ", keys, "] and [", call.batch, ", ", call.queries, ", ", keys, "]");
  do_not(static_cast<bool>(bias), "key_padding_mask: not together with attention_bias; put -inf into that");
  const std::int64_t queries = rows ? call.queries : 1;
  auto* const seen = run.scratch_of<bool>(call.batch * queries * keys);
  const auto* const given = padding.as<std::int32_t>();
  if (run.on_gpu()) {
    gpu::mark_seen(run.stream(), {.given = given, .lengths = lengths, .rows = call.batch * queries, .keys = keys}, seen);
  } else {
    for (std::int64_t b = 0; b < call.batch; ++b)
      for (std::int64_t i = 0; i < queries * keys; ++i)
        seen[b * queries * keys + i] = lengths ? i < given[b] : given[b * queries * keys + i] > 0;
  }
  call.mask = broadcast_mask({seen, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, {call.batch, 1, queries, keys}}, "key_padding_mask",
                             call.batch, heads_, call.queries);
}

void MultiHeadAttention::compute(Run& run) const {
  Attend call = sizes_of(run);
  set_past(run, call);
  set_mask(run, call);
  call.scale = scale_;
  // One query is the last token. Where there are more keys than queries beside the past, ONNX Runtime's providers do not agree on
  // which queries the keys belong to.
  demand(!causal_ || call.queries <= 1 || call.new_tokens <= call.queries, "unidirectional = 1: ", call.queries, " queries and ",
         call.new_tokens, " keys beside the past: allowed one query, or as many keys as queries");
  call.causal = causal_ && call.queries > 1;
  const std::int64_t width = heads_ * call.value_dim;
  const Tensor output = run.output(kOutput, {call.batch, call.queries, width});
  call.o = {.data = output.data, .dtype = call.q.dtype, .strides = bshd(call.queries, width, call.value_dim)};
  const std::int64_t keys = call.past_tokens + call.new_tokens;
  call.present_k = run.output(kPresentKey, {call.batch, heads_, keys, call.head_dim}).data;
  call.present_v = run.output(kPresentValue, {call.batch, heads_, keys, call.value_dim}).data;
  attend(run, call);
}

}  // namespace

Ops multi_head_attention() { return ops<MultiHeadAttention>(); }

}  // namespace lean::ort

// Attention of ONNX, opset 23 to 25: one definition, since each newer opset added what may be left out.
#include <cmath>

#include "attend.hpp"
#include "gpu.hpp"
#include "op.hpp"
#include "ops.hpp"

namespace lean::ort {
namespace {

enum In : std::size_t { kQ, kK, kV, kMask, kPastKey, kPastValue, kNonpad };
enum Out : std::size_t { kY, kPresentKey, kPresentValue, kQk };

class Attention {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr Port kInputs[] = {
      {"Q"}, {"K"}, {"V"}, {"attn_mask", true}, {"past_key", true}, {"past_value", true}, {"nonpad_kv_seqlen", true}};
  static constexpr Port kOutputs[] = {{"Y"}, {"present_key", true}, {"present_value", true}, {"qk_matmul_output", true}};

  static void infer(const Inference& inference);
  explicit Attention(const Node& node);
  void compute(Run& run) const;

 private:
  [[nodiscard]] Attend sizes_of(const Tensor& q, const Tensor& k, const Tensor& v) const;
  void set_past(const Run& run, Attend& call) const;
  void set_valid(Run& run, Attend& call) const;

  std::int64_t q_heads_;
  std::int64_t kv_heads_;
  float scale_;
  float softcap_;
  bool causal_;
  std::int64_t window_left_;
  std::int64_t window_right_;
};

void Attention::infer(const Inference& inference) {
  const std::int64_t heads = inference.integer("kv_num_heads", 0);
  const std::size_t given = inference.input(kQ).dims.size();
  const bool flat = given == 3 || (given != 4 && heads > 0);
  const auto q = inference.input(kQ).of_rank(flat ? 3 : 4);
  const auto k = inference.input(kK).of_rank(flat ? 3 : 4);
  const auto v = inference.input(kV).of_rank(flat ? 3 : 4);
  const Dim kv_heads = flat ? Dim{heads} : k.dims[1];
  const Dim head_dim = flat ? k.dims[2] / heads : k.dims[3];
  const Dim value_dim = flat ? v.dims[2] / heads : v.dims[3];
  if (flat)
    inference.set_output(kY, q.type, {q.dims[0], q.dims[1], value_dim * inference.integer("q_num_heads", 0)});
  else
    inference.set_output(kY, q.type, {q.dims[0], q.dims[1], q.dims[2], value_dim});
  inference.set_output(kPresentKey, k.type, {q.dims[0], kv_heads, {}, head_dim});
  inference.set_output(kPresentValue, v.type, {q.dims[0], kv_heads, {}, value_dim});
}

Attention::Attention(const Node& node)
    : q_heads_(node.integer("q_num_heads", 0)),
      kv_heads_(node.integer("kv_num_heads", 0)),
      scale_(node.number("scale", std::nanf(""))),
      softcap_(node.number("softcap", 0.0F)),
      causal_(node.flag("is_causal", false)),
      window_left_(node.integer("left_window_size", -1)),
      window_right_(node.integer("right_window_size", -1)) {
  demand(scale_ != 0.0F, "scale = 0: every score would be 0; leave it away for 1 / sqrt(d)");
  if (std::isnan(scale_)) scale_ = 0.0F;
  demand(window_left_ >= -1, "left_window_size = ", window_left_, ": allowed -1 (all) or more");
  demand(window_right_ >= -1, "right_window_size = ", window_right_, ": allowed -1 (all) or more");
  do_not(node.has_output(kQk), "qk_matmul_output: scores are not given out, leave the output away");
  const std::int64_t precision = node.integer("softmax_precision", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  do_not(precision != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && precision != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 &&
             precision != ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
         "softmax_precision = ", precision, ": the softmax is in fp32: allowed 1 (float32), 10 (float16), 16 (bfloat16)");
  demand(node.has_input(kPastKey) == node.has_input(kPastValue), "past_key and past_value: both or neither");
  demand(!(node.has_input(kNonpad) && node.has_input(kPastKey)), "nonpad_kv_seqlen: not together with past_key");
  const auto type = node.computed_type(kQ, "Q");
  for (const std::size_t i : {kK, kV, kPastKey, kPastValue})
    if (node.has_input(i))
      do_not(node.input_type(i) != type, kInputs[i].name, ": is ", node.input_type(i), ": must be ", type, " as Q");
}

struct Shapes {
  const Shape& q;
  const Shape& k;
  const Shape& v;
};

std::ostream& operator<<(std::ostream& out, const Shapes& shapes) {
  using lean::ort::operator<<;
  return out << "Q " << shapes.q << ", K " << shapes.k << ", V " << shapes.v;
}

/// What the three shapes say, [B, heads, tokens, dim] or [B, tokens, heads x dim].
Attend Attention::sizes_of(const Tensor& q, const Tensor& k, const Tensor& v) const {
  const std::size_t rank = q.shape.size();
  const Shapes shapes{q.shape, k.shape, v.shape};
  demand((rank == 3 || rank == 4) && k.shape.size() == rank && v.shape.size() == rank, shapes,
         ": all three must have 3 axes, or 4");
  Attend call{.batch = q.shape[0]};
  if (rank == 4) {
    call.q_heads = q.shape[1];
    call.kv_heads = k.shape[1];
    demand(q_heads_ == 0 || q_heads_ == call.q_heads, "q_num_heads = ", q_heads_, ": ", shapes);
    demand(kv_heads_ == 0 || kv_heads_ == call.kv_heads, "kv_num_heads = ", kv_heads_, ": ", shapes);
    call.queries = q.shape[2];
    call.new_tokens = k.shape[2];
    call.head_dim = q.shape[3];
    call.value_dim = v.shape[3];
    demand(v.shape[1] == call.kv_heads && v.shape[2] == call.new_tokens && k.shape[3] == call.head_dim, shapes, ": do not fit");
  } else {
    demand(q_heads_ > 0 && kv_heads_ > 0, "q_num_heads = ", q_heads_, ", kv_num_heads = ", kv_heads_, ": needed with 3 axes");
    call.q_heads = q_heads_;
    call.kv_heads = kv_heads_;
    call.queries = q.shape[1];
    call.new_tokens = k.shape[1];
    call.head_dim = q.shape[2] / q_heads_;
    call.value_dim = v.shape[2] / kv_heads_;
    demand(q.shape[2] == call.head_dim * q_heads_ && k.shape[2] == call.head_dim * kv_heads_ && v.shape[1] == call.new_tokens &&
               v.shape[2] == call.value_dim * kv_heads_,
           shapes, ": do not fit q_num_heads = ", q_heads_, ", kv_num_heads = ", kv_heads_);
  }
  demand(k.shape[0] == call.batch && v.shape[0] == call.batch, shapes, ": batches differ");
  demand(call.head_dim > 0 && call.value_dim > 0, shapes, ": heads must not be empty");
  demand(call.kv_heads > 0 && call.q_heads % call.kv_heads == 0, shapes, ": heads of K must divide heads of Q");
  const bool flat = rank == 3;
  const auto view = [&](const Tensor& tensor, std::int64_t heads, std::int64_t tokens, std::int64_t dim) {
    return TensorView{.data = tensor.data,
                      .dtype = dtype_of(tensor.type, "Q"),
                      .strides = flat ? bshd(tokens, heads * dim, dim) : bhsd(heads, tokens, dim)};
  };
  call.q = view(q, call.q_heads, call.queries, call.head_dim);
  call.k = view(k, call.kv_heads, call.new_tokens, call.head_dim);
  call.v = view(v, call.kv_heads, call.new_tokens, call.value_dim);
  return call;
}

void Attention::set_past(const Run& run, Attend& call) const {
  const Tensor past = run.input(kPastKey);
  if (!past) return;
  demand(past.shape.size() == 4, "past_key: shape ", past.shape, ": must be [B, heads, tokens, dim]");
  call.past_tokens = past.shape[2];
  for (const auto& [view, i, dim] :
       {std::tuple(&call.past_k, kPastKey, call.head_dim), std::tuple(&call.past_v, kPastValue, call.value_dim)}) {
    const Tensor given = run.input(i);
    const Shape wanted{call.batch, call.kv_heads, call.past_tokens, dim};
    demand(given.shape == wanted, kInputs[i].name, ": shape ", given.shape, ": must be ", wanted);
    *view = {.data = given.data, .dtype = call.q.dtype, .strides = bhsd(call.kv_heads, call.past_tokens, dim)};
  }
}

void Attention::set_valid(Run& run, Attend& call) const {
  const Tensor valid = run.input(kNonpad);
  if (!valid) return;
  demand(valid.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 && valid.shape == Shape{call.batch}, "nonpad_kv_seqlen: is ", valid.type,
         " ", valid.shape, ": must be int64 [", call.batch, "]");
  auto* const counts = run.scratch_of<std::int32_t>(call.batch);
  call.valid = counts;
  if (run.on_gpu()) return gpu::count(run.stream(), {.values = valid.data, .int64 = true}, call.batch, counts);
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t tokens = valid.as<std::int64_t>()[b];
    demand(tokens >= 0 && tokens <= call.new_tokens, "nonpad_kv_seqlen[", b, "] = ", tokens, ": allowed 0 to ", call.new_tokens);
    counts[b] = static_cast<std::int32_t>(tokens);
  }
}

void Attention::compute(Run& run) const {
  const Tensor q = run.input(kQ);
  Attend call = sizes_of(q, run.input(kK), run.input(kV));
  set_past(run, call);
  set_valid(run, call);
  call.mask = broadcast_mask(run.input(kMask), "attn_mask", call.batch, call.q_heads, call.queries);
  call.scale = scale_;
  call.softcap = softcap_;
  call.causal = causal_;
  call.window_left = window_left_;
  call.window_right = window_right_;
  const bool flat = q.shape.size() == 3;
  const std::int64_t width = call.q_heads * call.value_dim;
  const Tensor y =
      run.output(kY, flat ? Shape{call.batch, call.queries, width} : Shape{call.batch, call.q_heads, call.queries, call.value_dim});
  call.o = {.data = y.data,
            .dtype = call.q.dtype,
            .strides = flat ? bshd(call.queries, width, call.value_dim) : bhsd(call.q_heads, call.queries, call.value_dim)};
  const std::int64_t tokens = call.past_tokens + call.new_tokens;
  call.present_k = run.output(kPresentKey, {call.batch, call.kv_heads, tokens, call.head_dim}).data;
  call.present_v = run.output(kPresentValue, {call.batch, call.kv_heads, tokens, call.value_dim}).data;
  attend(run, call);
}

/// Under ONNX's own name: which opset's definition a node is of, its kernel cannot see.
class BuiltInAttention : public Attention {
 public:
  explicit BuiltInAttention(const Node& node) : Attention(node) {
    const std::string opset = unknown_definition(kName);
    do_not(!opset.empty(), "ONNX Runtime has a definition of opset ", opset,
           ", which is not known here, and a kernel cannot see whose node it is: allowed through lean_attention.ort.rewrite()");
  }
};

}  // namespace

Ops attention() { return ops<Attention>(); }
Ops built_in_attention() { return ops<BuiltInAttention>(); }

}  // namespace lean::ort

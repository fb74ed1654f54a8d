#include "attend.hpp"

#include <algorithm>
#include <limits>

namespace lean::ort {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

bool has_positions(const Attend& call) { return call.causal || call.window_left >= 0 || call.window_right >= 0; }

/// Past and new tokens in one buffer: present, or memory of the run's own. Without either the new ones stay where they are.
TensorView joined(Run& run, const Attend& call, const TensorView& past, const TensorView& fresh, void* present, std::int64_t dim) {
  if (present == nullptr && past.data == nullptr) return fresh;
  const std::int64_t tokens = call.past_tokens + call.new_tokens;
  const Strides strides = bhsd(call.kv_heads, tokens, dim);
  const auto bytes = static_cast<std::size_t>(call.batch * strides.sequence * bytes_of(fresh.dtype));
  const TensorView all{.data = present != nullptr ? present : run.scratch(bytes), .dtype = fresh.dtype, .strides = strides};
  const Extent extent{call.batch, call.kv_heads, dim};
  if (past.data != nullptr) copy_tokens(run, past, all, extent, {.most = call.past_tokens});
  copy_tokens(run, fresh, from_token(all, call.past_tokens), extent, {.most = call.new_tokens});
  return all;
}

/// The number at an element of the mask, with what a boolean one means.
float mask_value(const Mask& mask, const std::vector<float>& floats, std::int64_t element) {
  if (mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL) return static_cast<const bool*>(mask.data)[element] ? 0.0F : kHidden;
  return floats[static_cast<std::size_t>(element)];
}

/// Every rule of the call as one fp32 mask [B, Hq or 1, S, keys]: for what the library's own rules do not say, which is a number of
/// new tokens other than that of the queries, or a short mask, together with positions.
class MaskOfRules {
 public:
  MaskOfRules(Run& run, const Attend& call, Problem& problem) {
    const std::int64_t keys = call.past_tokens + call.new_tokens;
    const std::int64_t heads = call.mask.data != nullptr && call.mask.strides.head != 0 ? call.q_heads : 1;
    const std::vector<float> floats = floats_of(call);
    values_.resize(static_cast<std::size_t>(call.batch * heads * call.queries * keys));
    run.parallel(static_cast<std::size_t>(call.batch * heads * call.queries), [&](std::size_t at) {
      const auto row = static_cast<std::int64_t>(at);
      fill_row(call, floats, {row / (heads * call.queries), row / call.queries % heads, row % call.queries},
               &values_[at * static_cast<std::size_t>(keys)]);
    });
    problem.scores.causal = false;
    problem.scores.window_left = problem.scores.window_right = -1;
    problem.scores.mask = values_.data();
    problem.scores.mask_dtype = DType::kFloat32;
    problem.scores.mask_is_boolean = false;
    problem.scores.mask_strides = bhsd(heads, call.queries, keys);
    if (heads == 1) problem.scores.mask_strides.head = 0;
  }

 private:
  struct Row {
    std::int64_t sequence, head, query;
  };

  static std::vector<float> floats_of(const Attend& call) {
    if (call.mask.data == nullptr || call.mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL) return {};
    const Strides& strides = call.mask.strides;
    const std::int64_t last = (call.batch - 1) * strides.sequence + (call.q_heads - 1) * strides.head +
                              (call.queries - 1) * strides.token + (call.mask.keys - 1) * strides.dim;
    return to_floats({const_cast<void*>(call.mask.data), call.mask.type, {std::max<std::int64_t>(last + 1, 0)}}, call.mask.name);
  }

  static void fill_row(const Attend& call, const std::vector<float>& floats, const Row& row, float* values) {
    const std::int64_t keys = call.past_tokens + call.new_tokens;
    const bool counted = call.valid != nullptr;
    const std::int64_t there = counted ? call.valid[row.sequence] : keys;
    const std::int64_t position = (counted ? there - call.queries : call.past_tokens) + row.query;
    const Strides& strides = call.mask.strides;
    const std::int64_t first = row.sequence * strides.sequence + row.head * strides.head + row.query * strides.token;
    for (std::int64_t key = 0; key < keys; ++key) {
      const bool seen = key < there && (!call.causal || key <= position) &&
                        (call.window_left < 0 || position - key <= call.window_left) &&
                        (call.window_right < 0 || key - position <= call.window_right);
      float value = seen ? 0.0F : kHidden;
      if (seen && call.mask.data != nullptr)
        value = key < call.mask.keys ? mask_value(call.mask, floats, first + key * strides.dim) : kHidden;
      values[key] = value;
    }
  }

  std::vector<float> values_;
};

void set_rules(const Attend& call, Problem& problem) {
  const auto window = [](std::int64_t tokens) { return static_cast<std::int32_t>(std::min<std::int64_t>(tokens, INT32_MAX)); };
  problem.scores.causal = call.causal;
  problem.scores.window_left = window(call.window_left);
  problem.scores.window_right = window(call.window_right);
  if (call.mask.data == nullptr) return;
  problem.scores.mask = call.mask.data;
  problem.scores.mask_is_boolean = call.mask.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
  if (!problem.scores.mask_is_boolean) problem.scores.mask_dtype = dtype_of(call.mask.type, call.mask.name);
  problem.scores.mask_strides = call.mask.strides;
}

/// What lies from token `tokens` on counts for nobody.
void decode_up_to(Run& run, std::int64_t tokens, Problem& problem) {
  problem.kv_capacity = static_cast<std::int32_t>(tokens);
  if (tokens == 0) problem.k.data = problem.v.data = nullptr;
  run.decode(problem);
}

}  // namespace

Mask broadcast_mask(const Tensor& tensor, const char* name, std::int64_t batch, std::int64_t heads, std::int64_t queries) {
  if (!tensor) return {};
  const std::size_t rank = tensor.shape.size();
  demand(rank >= 1 && rank <= 4, name, ": shape ", tensor.shape, ": allowed 1 to 4 axes");
  Shape shape(4 - rank, 1);
  shape.insert(shape.end(), tensor.shape.begin(), tensor.shape.end());
  const std::int64_t wanted[] = {batch, heads, queries};
  for (std::size_t axis = 0; axis < 3; ++axis)
    demand(shape[axis] == 1 || shape[axis] == wanted[axis], name, ": shape ", tensor.shape, ": must broadcast to [", batch, ", ",
           heads, ", ", queries, ", keys]");
  if (tensor.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL)
    do_not(traits_of(dtype_of(tensor.type, name)).scaled, name, ": is ", tensor.type, ": allowed bool, float32, float16, bfloat16");
  Mask mask{
      .name = name, .data = tensor.data, .type = tensor.type, .keys = shape[3], .strides = bhsd(shape[1], shape[2], shape[3])};
  if (shape[0] == 1) mask.strides.sequence = 0;
  if (shape[1] == 1) mask.strides.head = 0;
  if (shape[2] == 1) mask.strides.token = 0;
  return mask;
}

void attend(Run& run, const Attend& call) {
  const std::int64_t keys = call.past_tokens + call.new_tokens;
  demand(keys <= INT32_MAX && call.queries <= INT32_MAX && call.batch <= INT32_MAX, "K: ", keys,
         " tokens: allowed up to 2147483647");
  demand(call.mask.keys <= keys, call.mask.name, ": ", call.mask.keys, " keys: there are ", keys);
  demand(call.mask.data == nullptr || call.mask.keys != 1 || keys == 1, call.mask.name, ": 1 key: there are ", keys,
         ", and ONNX broadcasts such an axis in opset 23, and pads it in opset 24: give all keys");
  Problem problem{.batch = call.batch,
                  .q_heads = static_cast<std::int32_t>(call.q_heads),
                  .kv_heads = static_cast<std::int32_t>(call.kv_heads),
                  .head_dim = static_cast<std::int32_t>(call.head_dim),
                  .value_dim = static_cast<std::int32_t>(call.value_dim),
                  .q = call.q,
                  .k = joined(run, call, call.past_k, call.k, call.present_k, call.head_dim),
                  .v = joined(run, call, call.past_v, call.v, call.present_v, call.value_dim),
                  .o = call.o,
                  .q_tokens = static_cast<std::int32_t>(call.queries),
                  .kv_capacity = static_cast<std::int32_t>(keys)};
  if (call.batch == 0 || call.queries == 0) return;
  problem.scores = {.scale = call.scale, .softcap = call.softcap};

  // The library counts queries back from the last token. A causal call sees nothing behind its last query: lengths end there.
  const std::int64_t end = call.past_tokens + call.queries;
  std::int64_t longest = call.valid == nullptr && call.causal ? std::min(end, keys) : keys;
  if (!has_positions(call) && call.mask.data != nullptr) longest = std::min(longest, call.mask.keys);
  if (call.valid != nullptr && !run.on_gpu())
    longest = std::min<std::int64_t>(longest, *std::max_element(call.valid, call.valid + call.batch));
  const bool same_positions = call.valid != nullptr || longest == end || !has_positions(call);
  const bool short_mask = call.mask.data != nullptr && call.mask.keys < longest;
  if (same_positions && !short_mask) {
    problem.kv_lengths = call.valid;
    set_rules(call, problem);
    return decode_up_to(run, longest, problem);
  }
  do_not(run.on_gpu(), short_mask ? call.mask.name : "K", ": ", short_mask ? call.mask.keys : call.new_tokens,
         short_mask ? " keys" : " new tokens", " with ", call.queries,
         " queries and positions (causal, windows): allowed on the CUDA ",
         "provider as many new tokens as queries, and a mask of all ", keys, " keys");
  const MaskOfRules rules(run, call, problem);
  run.decode(problem);
}

}  // namespace lean::ort

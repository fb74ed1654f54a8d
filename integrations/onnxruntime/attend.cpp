#include "attend.hpp"

#include <algorithm>

#include "gpu.hpp"
#include "rule_mask.hpp"

namespace lean::ort {
namespace {

bool has_positions(const Attend& call) { return call.causal || call.window_left >= 0 || call.window_right >= 0; }

/// Where past and new tokens are side by side: present, or memory of the run's own, after `moves`. Without either the new ones stay
/// where they are.
TensorView joined(Run& run, const Attend& call, const TensorView& past, const TensorView& fresh, void* present, std::int64_t dim,
                  std::vector<Move>& moves) {
  if (present == nullptr && past.data == nullptr) return fresh;
  const std::int64_t tokens = call.past_tokens + call.new_tokens;
  const Strides strides = bhsd(call.kv_heads, tokens, dim);
  const auto bytes = static_cast<std::size_t>(call.batch * strides.sequence * bytes_of(fresh.dtype));
  const TensorView all{.data = present != nullptr ? present : run.scratch(bytes), .dtype = fresh.dtype, .strides = strides};
  const Extent extent{call.batch, call.kv_heads, dim};
  if (past.data != nullptr) moves.push_back(copy_of(past, all, extent, {.most = call.past_tokens}));
  moves.push_back(copy_of(fresh, from_token(all, call.past_tokens), extent, {.most = call.new_tokens}));
  return all;
}

/// Puts one mask in the place of the problem's rules about keys.
void mask_rules(Run& run, const Attend& call, Problem& problem) {
  const std::int64_t keys = call.past_tokens + call.new_tokens;
  const RuleMask rules{.batch = call.batch,
                       .heads = call.mask.data != nullptr && call.mask.strides.head != 0 ? call.q_heads : 1,
                       .queries = call.queries,
                       .keys = keys,
                       .past_tokens = call.past_tokens,
                       .valid = call.valid,
                       .scores = problem.scores,
                       .mask_keys = call.mask.keys};
  auto* const values = run.scratch_of<float>(rules.rows() * keys);
  if (run.on_gpu()) {
    gpu::fill_mask(run.stream(), rules, values);
  } else {
    run.parallel(static_cast<std::size_t>(rules.rows()), [&](std::size_t at) {
      const auto row = static_cast<std::int64_t>(at);
      for (std::int64_t key = 0; key < keys; ++key) values[row * keys + key] = mask_value(rules, row, key);
    });
  }
  problem.scores = {
      .scale = call.scale, .softcap = call.softcap, .mask = values, .mask_strides = bhsd(rules.heads, call.queries, keys)};
  if (rules.heads == 1) problem.scores.mask_strides.head = 0;
}

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
  std::vector<Move> moves;
  Problem problem{.batch = call.batch,
                  .q_heads = static_cast<std::int32_t>(call.q_heads),
                  .kv_heads = static_cast<std::int32_t>(call.kv_heads),
                  .head_dim = static_cast<std::int32_t>(call.head_dim),
                  .value_dim = static_cast<std::int32_t>(call.value_dim),
                  .q = call.q,
                  .k = joined(run, call, call.past_k, call.k, call.present_k, call.head_dim, moves),
                  .v = joined(run, call, call.past_v, call.v, call.present_v, call.value_dim, moves),
                  .o = call.o,
                  .q_tokens = static_cast<std::int32_t>(call.queries),
                  .kv_capacity = static_cast<std::int32_t>(keys)};
  move_tokens(run, moves);
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
  set_rules(call, problem);
  if (same_positions && !short_mask) {
    problem.kv_lengths = call.valid;
    return decode_up_to(run, longest, problem);
  }
  mask_rules(run, call, problem);
  run.decode(problem);
}

}  // namespace lean::ort

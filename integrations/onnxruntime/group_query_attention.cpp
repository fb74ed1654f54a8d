// GroupQueryAttention of com.microsoft: new keys and values go into a cache [B, Hkv, capacity, d], rotated on the way, and the new
// queries attend to it, in one call of the library. Of the S rows that each sequence brings, the first Q_b are tokens and the rest
// padding; T_b = seqlens_k[b] + 1 tokens are in its cache after the call, P_b = T_b - Q_b before it.
#include <algorithm>

#include "cache.hpp"
#include "gpu.hpp"
#include "grouped.hpp"
#include "op.hpp"
#include "ops.hpp"

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

constexpr GroupedInputs kGrouped{.query = kQuery,
                                 .key = kKey,
                                 .value = kValue,
                                 .k_cache = kPastKey,
                                 .v_cache = kPastValue,
                                 .cos = kCos,
                                 .sin = kSin,
                                 .sink = kHeadSink,
                                 .k_scale = kKScale,
                                 .v_scale = kVScale,
                                 .q_norm = kQNorm,
                                 .k_norm = kKNorm,
                                 .k_cache_name = "past_key",
                                 .v_cache_name = "past_value",
                                 .causal_name = "causal"};

/// What a run asks, once its inputs are read and found to fit each other.
struct Sizes {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;    // S
  std::int64_t head_dim = 0;  // d
  std::int64_t past_capacity = 0;
  std::int64_t capacity = 0;  // of the cache after the call
  std::int64_t longest = 0;   // no sequence has more tokens after the call
  bool even = false;          // Q_b = S for all

  const std::int32_t* totals = nullptr;  // T_b, where the node runs
  const std::int32_t* cached = nullptr;  // on a GPU where each brings one: tokens before the call, which then counts them itself
  // On the CPU: what the host reads.
  std::vector<std::int32_t> totals_read{};
  std::vector<std::int64_t> new_tokens{};  // Q_b
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
  [[nodiscard]] Sizes sizes_of(Run& run, const Tensor& query) const;
  void check_past(const Run& run, Sizes& sizes) const;
  void count_on_gpu(Run& run, Sizes& sizes) const;
  void read_lengths(const Run& run, Sizes& sizes) const;
  void check_positions(const Run& run, const Sizes& sizes) const;
  void set_bias(const Run& run, const Sizes& sizes, Problem& problem) const;
  void set_cache(Run& run, const Sizes& sizes, Problem& problem) const;
  void decode_each(Run& run, const Sizes& sizes, const Problem& problem) const;
  void decode_padded(Run& run, const Sizes& sizes, Problem problem) const;

  Grouped grouped_;
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

GroupQueryAttention::GroupQueryAttention(const Node& node) : grouped_(node, kGrouped) { check_node(node); }

void GroupQueryAttention::check_node(const Node& node) const {
  demand(grouped_.causal() || grouped_.window() == -1, "local_window_size = ", grouped_.window(), ": must be -1 with causal = 0");
  do_not(node.integer("qk_output", 0) != 0 || node.has_output(kOutputQk),
         "qk_output: scores are not given out, leave output_qk away");
  do_not(node.integer("sliding_window_cache", 0) != 0,
         "sliding_window_cache = 1: the cache is as long as the sequence here; local_window_size does the same on that");
  do_not(node.integer("kv_cache_bit_width", 0) != 0,
         "kv_cache_bit_width: int8 and int4 caches are not read; a float8e4m3fn cache is");
  demand(node.has_input(kPastKey) == node.has_input(kPastValue), "past_key and past_value: both or neither");
  do_not(
      node.on_gpu() && node.has_input(kPositionIds) && grouped_.rotates(),
      "position_ids: a token is rotated by its place in the cache, and ids on a GPU are not compared with that: leave them away");
}

Sizes GroupQueryAttention::sizes_of(Run& run, const Tensor& query) const {
  demand(query.shape.size() == 3, "query: shape ", query.shape, ": must be [B, S, width]");
  Sizes sizes{.batch = query.shape[0], .tokens = query.shape[1]};
  sizes.head_dim = grouped_.head_dim_of(query.shape[2], !run.input(kKey));
  grouped_.check_key_and_value(run, query, {sizes.batch, sizes.tokens, grouped_.kv_heads() * sizes.head_dim});
  const Tensor total = run.input(kTotal);
  demand(total.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && total.elements() == 1, "total_sequence_length: must be one int32");
  sizes.longest = *total.as<std::int32_t>();
  demand(sizes.longest >= sizes.tokens && sizes.longest > 0, "total_sequence_length = ", sizes.longest, ": must be at least the ",
         sizes.tokens, " tokens of query");
  check_past(run, sizes);
  for (const auto& [name, given] :
       {std::pair("seqlens_k", run.input(kSeqlensK)), std::pair("query_seqlens", run.input(kQuerySeqlens))})
    demand(!given || (given.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && given.elements() == sizes.batch), name, ": is ",
           given.type, " ", given.shape, ": must be int32 [", sizes.batch, "]");
  if (run.on_gpu())
    count_on_gpu(run, sizes);
  else
    read_lengths(run, sizes);
  return sizes;
}

void GroupQueryAttention::check_past(const Run& run, Sizes& sizes) const {
  const Tensor past = run.input(kPastKey);
  if (past) {
    demand(past.shape.size() == 4, "past_key: shape ", past.shape, ": must be [B, Hkv, capacity, d]");
    const Shape wanted{sizes.batch, grouped_.kv_heads(), past.shape[2], sizes.head_dim};
    for (const std::size_t i : {kPastKey, kPastValue}) {
      const Tensor given = run.input(i);
      demand(given.shape == wanted, kInputs[i].name, ": shape ", given.shape, ": must be ", wanted);
      demand(given.type == past.type, kInputs[i].name, ": is ", given.type, ": must be ", past.type, " as past_key");
    }
    sizes.past_capacity = past.shape[2];
  }
  sizes.capacity = std::max(sizes.longest, sizes.past_capacity);
  demand(sizes.capacity <= INT32_MAX && sizes.tokens <= INT32_MAX, "past_key: ", sizes.capacity,
         " tokens: allowed up to 2147483647");
}

/// What the host cannot know is left to the kernels: they clamp a length to the cache, and a sequence of which they had to gets
/// no new token.
void GroupQueryAttention::count_on_gpu(Run& run, Sizes& sizes) const {
  const Tensor lengths = run.input(kSeqlensK);
  auto* const totals = run.scratch_of<std::int32_t>(sizes.batch);
  sizes.totals = totals;
  sizes.even = !run.input(kQuerySeqlens) && (sizes.tokens == 1 || sizes.batch == 1);
  const Tensor past = run.input(kPastKey);
  const auto in_place = [&](std::size_t past_index, std::size_t present_index) {
    return past && run.input(past_index).data == run.output(present_index, past.shape).data;
  };
  if (sizes.even && sizes.tokens == 1 && sizes.capacity == sizes.past_capacity && in_place(kPastKey, kPresentKey) &&
      in_place(kPastValue, kPresentValue)) {
    sizes.cached = lengths.as<std::int32_t>();  // one below the totals
    return;
  }
  gpu::count(run.stream(), {.values = lengths.data, .plus = 1}, sizes.batch, totals);
}

void GroupQueryAttention::read_lengths(const Run& run, Sizes& sizes) const {
  const Tensor lengths = run.input(kSeqlensK);
  const Tensor rows = run.input(kQuerySeqlens);
  sizes.longest = 0;
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const std::int64_t total = std::int64_t{lengths.as<std::int32_t>()[b]} + 1;
    demand(total > 0 && total <= sizes.capacity, "seqlens_k[", b, "] = ", total - 1, ": allowed 0 to ", sizes.capacity - 1,
           ", one below the tokens that the cache holds");
    const std::int64_t most = std::min(sizes.tokens, total);
    const std::int64_t tokens = rows ? rows.as<std::int32_t>()[b] : most;
    demand(tokens >= 0 && tokens <= most, "query_seqlens[", b, "] = ", tokens, ": allowed 0 to ", most);
    demand(total - tokens <= sizes.past_capacity, "seqlens_k[", b, "] = ", total - 1, ": says ", total - tokens,
           " tokens before this step, and past_key holds ", sizes.past_capacity);
    sizes.totals_read.push_back(static_cast<std::int32_t>(total));
    sizes.new_tokens.push_back(tokens);
    sizes.longest = std::max(sizes.longest, total);
  }
  sizes.totals = sizes.totals_read.data();
  sizes.even = std::all_of(sizes.new_tokens.begin(), sizes.new_tokens.end(), [&](std::int64_t n) { return n == sizes.tokens; });
}

void GroupQueryAttention::check_positions(const Run& run, const Sizes& sizes) const {
  const Tensor ids = run.input(kPositionIds);
  if (!ids || !grouped_.rotates() || run.on_gpu()) return;
  demand(ids.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 && ids.elements() == sizes.batch * sizes.tokens, "position_ids: is ",
         ids.type, " ", ids.shape, ": must be int64 [", sizes.batch, ", ", sizes.tokens, "]");
  for (std::int64_t b = 0; b < sizes.batch; ++b)
    for (std::int64_t i = 0; i < sizes.new_tokens[static_cast<std::size_t>(b)]; ++i) {
      const std::int64_t given = ids.as<std::int64_t>()[b * sizes.tokens + i];
      const auto at = static_cast<std::size_t>(b);
      const std::int64_t place = sizes.totals[at] - sizes.new_tokens[at] + i;
      do_not(given != place, "position_ids[", b, "][", i, "] = ", given, ": a token is rotated by its place in the cache, here ",
             place);
    }
}

void GroupQueryAttention::set_bias(const Run& run, const Sizes& sizes, Problem& problem) const {
  const Tensor bias = run.input(kBias);
  if (!bias) return;
  const Shape& shape = bias.shape;
  const std::int64_t heads = grouped_.q_heads();
  demand(shape.size() == 4 && (shape[0] == 1 || shape[0] == sizes.batch) && (shape[1] == 1 || shape[1] == heads) &&
             shape[2] == sizes.tokens && shape[3] >= sizes.longest,
         "attention_bias: shape ", shape, ": must be [", sizes.batch, " or 1, ", heads, " or 1, ", sizes.tokens, ", ",
         sizes.longest, " or more]");
  Scores& scores = problem.scores;
  scores.mask = bias.data;
  scores.mask_dtype = dtype_of(bias.type, "attention_bias");
  scores.mask_strides = bhsd(shape[1], shape[2], shape[3]);
  if (shape[0] == 1) scores.mask_strides.sequence = 0;
  if (shape[1] == 1) scores.mask_strides.head = 0;
  problem.kv_capacity = static_cast<std::int32_t>(std::min<std::int64_t>(problem.kv_capacity, shape[3]));
}

/// The cache that the call writes to: present, or memory of the run's own where nobody asks for present. What was in past is there
/// afterwards, without a copy when both are the same buffer.
void GroupQueryAttention::set_cache(Run& run, const Sizes& sizes, Problem& problem) const {
  const std::int64_t heads = grouped_.kv_heads();
  const Shape shape{sizes.batch, heads, sizes.capacity, sizes.head_dim};
  const Strides strides = bhsd(heads, sizes.capacity, sizes.head_dim);
  const Extent extent{sizes.batch, heads, sizes.head_dim};
  std::vector<Move> moves;
  for (const auto& [view, past_index, present_index] :
       {std::tuple(&problem.k, kPastKey, kPresentKey), std::tuple(&problem.v, kPastValue, kPresentValue)}) {
    const Tensor past = run.input(past_index);
    const Tensor present = run.output(present_index, shape);
    const DType dtype = past ? dtype_of(past.type, "past_key") : problem.q.dtype;
    const auto bytes = static_cast<std::size_t>(sizes.batch * strides.sequence * bytes_of(dtype));
    *view = {.data = present ? present.data : run.scratch(bytes), .dtype = dtype, .strides = strides};
    if (past.data == view->data) continue;
    const Strides past_strides = bhsd(heads, sizes.past_capacity, sizes.head_dim);
    const Counts there{.most = sizes.past_capacity, .of_sequence = sizes.totals};
    if (past) moves.push_back(copy_of({.data = past.data, .dtype = dtype, .strides = past_strides}, *view, extent, there));
    moves.push_back(zeroes_of(*view, extent, {.most = sizes.capacity, .of_sequence = sizes.totals}, sizes.capacity));
  }
  move_tokens(run, moves);
  grouped_.set_scales(run, problem);
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
    const Extent extent{1, grouped_.q_heads(), sizes.head_dim};
    move_tokens(run, {{zeroes_of(rows, extent, {.most = sizes.new_tokens[at]}, sizes.tokens)}});
  }
}

/// The same in one call, without a look at the lengths: sequence 2 b has the tokens of b, and sequence 2 b + 1 its padding,
/// which sees no keys and so is 0. Strides from one sequence to the next are halved; those of padding point where nobody reads.
void GroupQueryAttention::decode_padded(Run& run, const Sizes& sizes, Problem problem) const {
  for (const auto& [name, strides, otherwise] :
       {std::tuple("attention_bias", problem.scores.mask_strides, ", or one bias for all"),
        std::tuple("past_key, present_key", problem.k.strides, "")})  // values have the strides of keys
    do_not(strides.sequence % 2 != 0, name, ": an odd number of elements for each of ", sizes.batch, " sequences that bring ",
           sizes.tokens, " rows: allowed on the CUDA provider an even one", otherwise);
  auto* const lengths = run.scratch_of<std::int32_t>(2 * sizes.batch);
  auto* const starts = run.scratch_of<std::int32_t>(2 * sizes.batch + 1);
  gpu::split_padding(run.stream(), {.batch = sizes.batch,
                                    .rows = static_cast<std::int32_t>(sizes.tokens),
                                    .totals = sizes.totals,
                                    .tokens = run.input(kQuerySeqlens).as<std::int32_t>(),
                                    .lengths = lengths,
                                    .cu_q_tokens = starts});
  problem.batch = 2 * sizes.batch;
  problem.kv_lengths = lengths;
  problem.cu_q_tokens = starts;
  problem.total_q_tokens = sizes.batch * sizes.tokens;
  for (Strides* strides : {&problem.k.strides, &problem.v.strides, &problem.scores.mask_strides}) strides->sequence /= 2;
  run.decode(problem);
}

void GroupQueryAttention::compute(Run& run) const {
  const Tensor query = run.input(kQuery);
  const Sizes sizes = sizes_of(run, query);
  const std::int64_t width = grouped_.q_heads() * sizes.head_dim;
  const Tensor output = run.output(kOutput, {sizes.batch, sizes.tokens, width});
  Problem problem{.batch = sizes.batch,
                  .q_heads = static_cast<std::int32_t>(grouped_.q_heads()),
                  .kv_heads = static_cast<std::int32_t>(grouped_.kv_heads()),
                  .head_dim = static_cast<std::int32_t>(sizes.head_dim),
                  .q_tokens = static_cast<std::int32_t>(sizes.tokens),
                  .kv_capacity = static_cast<std::int32_t>(sizes.capacity),
                  .kv_lengths = sizes.totals};
  grouped_.set_new_tokens(run, sizes.tokens, problem);
  problem.append.cached_lengths = sizes.cached;
  problem.o = {.data = output.data, .dtype = problem.q.dtype, .strides = bshd(sizes.tokens, width, sizes.head_dim)};
  set_cache(run, sizes, problem);
  if (sizes.batch == 0 || sizes.tokens == 0) return;
  check_positions(run, sizes);
  grouped_.set_rotary(run, sizes.longest, problem);
  grouped_.set_scores(run, problem);
  set_bias(run, sizes, problem);
  if (sizes.even) return run.decode(problem);
  if (run.on_gpu()) return decode_padded(run, sizes, problem);
  decode_each(run, sizes, problem);
}

}  // namespace

Ops group_query_attention() { return ops<GroupQueryAttention>(); }

}  // namespace lean::ort

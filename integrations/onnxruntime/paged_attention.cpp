// PagedAttention of com.microsoft: tokens of all sequences packed end to end, and caches of pages [pages, page_tokens, Hkv, d] that a
// block table deals out. New keys and values go into the pages, rotated on the way, and the queries attend to them, in one call.
#include <algorithm>
#include <cstring>

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
  kKeyCache,
  kValueCache,
  kCuSeqlens,
  kPastSeqlens,
  kBlockTable,
  kCos,
  kSin,
  kSlotMapping,
  kHeadSink,
  kQNorm,
  kKNorm,
  kKScale,
  kVScale,
  kMetadata,
};
enum Out : std::size_t { kOutput, kKeyCacheOut, kValueCacheOut };

struct Sizes {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;    // of all sequences
  std::int64_t head_dim = 0;  // d
  std::int64_t width = 0;     // of a row of query
  bool packed = false;        // key and value stand behind query in the same rows
  std::int64_t longest = 0;   // most new tokens of a sequence

  std::vector<std::int32_t> totals{};  // tokens of each sequence, new ones included
};

class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr Port kInputs[] = {
      {"query"},
      {"key", true},
      {"value", true},
      {"key_cache"},
      {"value_cache", true},
      {"cumulative_sequence_length"},
      {"past_seqlens"},
      {"block_table"},
      {"cos_cache", true},
      {"sin_cache", true},
      {"slot_mapping", true},
      {"head_sink", true},
      {"q_norm_weight", true},
      {"k_norm_weight", true},
      {"k_scale", true},
      {"v_scale", true},
      {"attention_metadata", true, true},
  };
  static constexpr Port kOutputs[] = {{"output"}, {"key_cache_out", true}, {"value_cache_out", true}};

  static void infer(const Inference& inference);
  explicit PagedAttention(const Node& node);
  void compute(Run& run) const;

 private:
  void check_node(const Node& node) const;
  [[nodiscard]] Sizes sizes_of(const Run& run) const;
  void read_lengths(const Run& run, Sizes& sizes) const;
  void set_new_tokens(const Run& run, const Sizes& sizes, Problem& problem) const;
  void set_pages(Run& run, const Sizes& sizes, Problem& problem) const;
  void check_slots(const Run& run, const Problem& problem, const Sizes& sizes) const;

  std::int64_t q_heads_;
  std::int64_t kv_heads_;
  float scale_;
  float softcap_;
  std::int64_t window_;
  bool causal_;
  bool rotary_;
  Rotary tables_;
};

void PagedAttention::infer(const Inference& inference) {
  const auto query = inference.input(kQuery).of_rank(2);
  const std::int64_t q_heads = inference.integer("num_heads", 0);
  const bool packed = !inference.input(kKey);
  const Dim head_dim = query.dims[1] / (q_heads + (packed ? 2 * inference.integer("kv_num_heads", 0) : 0));
  inference.set_output(kOutput, query.type, {query.dims[0], packed ? head_dim * q_heads : query.dims[1]});
  for (const auto& [in, out] : {std::pair(kKeyCache, kKeyCacheOut), std::pair(kValueCache, kValueCacheOut)}) {
    const auto cache = inference.input(in).of_rank(4);
    inference.set_output(out, cache ? cache.type : query.type, cache.dims);
  }
}

PagedAttention::PagedAttention(const Node& node)
    : q_heads_(node.integer("num_heads", 0)),
      kv_heads_(node.integer("kv_num_heads", 0)),
      scale_(node.number("scale", 0.0F)),
      softcap_(node.number("softcap", 0.0F)),
      window_(node.integer("local_window_size", -1)),
      causal_(node.integer("is_causal", 1) != 0),
      rotary_(node.integer("do_rotary", 0) != 0) {
  check_node(node);
  if (rotary_) tables_ = Rotary(node, kCos, kSin, node.integer("rotary_interleaved", 0) != 0);
}

void PagedAttention::check_node(const Node& node) const {
  demand(q_heads_ > 0 && q_heads_ <= INT32_MAX, "num_heads = ", q_heads_, ": allowed 1 to 2147483647");
  demand(kv_heads_ > 0 && q_heads_ % kv_heads_ == 0, "kv_num_heads = ", kv_heads_, ": must divide num_heads = ", q_heads_);
  demand(window_ == -1 || window_ > 0, "local_window_size = ", window_, ": allowed -1 (all) or more than 0");
  const std::string layout = node.string("kv_cache_layout", "SEPARATE");
  do_not(layout != "SEPARATE" || !node.has_input(kValueCache), "kv_cache_layout = \"", layout,
         "\": allowed \"SEPARATE\", with value_cache");
  do_not(node.integer("v_head_size", 0) != 0, "v_head_size: goes with the LATENT layout, which is not read here");
  do_not(node.integer("rotary_offset", 0) != 0, "rotary_offset = ", node.integer("rotary_offset", 0), ": allowed 0");
  do_not(node.has_input(kQNorm) || node.has_input(kKNorm),
         "q_norm_weight, k_norm_weight: not applied here; leave SimplifiedLayerNormalization in front of the node");
  demand(!rotary_ || (node.has_input(kCos) && node.has_input(kSin)), "do_rotary = 1: needs cos_cache and sin_cache");
  demand(node.has_input(kKey) == node.has_input(kValue), "key and value: both, or neither with a packed query");
  const auto type = node.input_type(kQuery);
  do_not(bytes_of(dtype_of(type, "query")) == 1, "query: is ", type, ": allowed float32, float16, bfloat16");
  const auto cache_type = node.input_type(kKeyCache);
  const bool quantised = cache_type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
  do_not(cache_type != type && !quantised, "key_cache: is ", cache_type, ": allowed the type of query, or float8e4m3fn");
  demand(node.input_type(kValueCache) == cache_type, "value_cache: is ", node.input_type(kValueCache), ": must be ", cache_type,
         " as key_cache");
  for (const auto& [attribute, scale] : {std::pair("k_quant_type", kKScale), std::pair("v_quant_type", kVScale)}) {
    const std::string granularity = node.string(attribute, "NONE");
    do_not(granularity != (quantised ? "PER_TENSOR" : "NONE"), attribute, " = \"", granularity,
           "\": allowed \"NONE\" with a cache of the type of query, \"PER_TENSOR\" with a float8e4m3fn cache");
    demand(node.has_input(scale) == quantised, kInputs[scale].name, ": goes with a float8e4m3fn cache and with no other");
  }
  for (const char* const attribute : {"k_cache_dtype", "v_cache_dtype"}) {
    const std::string packing = node.string(attribute, "");
    do_not(packing == "int4" || packing == "int8" || packing == "float4e2m1", attribute, " = \"", packing,
           "\": allowed the type of query, or float8e4m3fn");
  }
}

Sizes PagedAttention::sizes_of(const Run& run) const {
  const Tensor query = run.input(kQuery);
  demand(query.shape.size() == 2, "query: shape ", query.shape, ": must be [tokens, width]");
  Sizes sizes{.tokens = query.shape[0], .width = query.shape[1], .packed = !run.input(kKey)};
  const std::int64_t heads_in_row = q_heads_ + (sizes.packed ? 2 * kv_heads_ : 0);
  demand(sizes.width > 0 && sizes.width % heads_in_row == 0, "query: width ", sizes.width, ": must be a multiple of ", heads_in_row,
         sizes.packed ? " heads (packed q, k and v)" : " heads");
  sizes.head_dim = sizes.width / heads_in_row;
  const Shape rows{sizes.tokens, kv_heads_ * sizes.head_dim};
  for (const std::size_t i : {kKey, kValue}) {
    if (sizes.packed) break;
    const Tensor given = run.input(i);
    demand(given.shape == rows && given.type == query.type, kInputs[i].name, ": is ", given.type, " ", given.shape, ": must be ",
           query.type, " ", rows);
  }
  read_lengths(run, sizes);
  return sizes;
}

void PagedAttention::read_lengths(const Run& run, Sizes& sizes) const {
  const Tensor cumulative = run.input(kCuSeqlens);
  const Tensor past = run.input(kPastSeqlens);
  const Tensor table = run.input(kBlockTable);
  const auto is_int32 = [](const Tensor& tensor, std::size_t rank) {
    return tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && tensor.shape.size() == rank;
  };
  demand(is_int32(cumulative, 1) && cumulative.shape[0] > 0, "cumulative_sequence_length: is ", cumulative.type, " ",
         cumulative.shape, ": must be int32 [B + 1]");
  sizes.batch = cumulative.shape[0] - 1;
  demand(is_int32(past, 1) && past.shape[0] == sizes.batch, "past_seqlens: is ", past.type, " ", past.shape, ": must be int32 [",
         sizes.batch, "]");
  demand(is_int32(table, 2) && table.shape[0] == sizes.batch, "block_table: is ", table.type, " ", table.shape, ": must be int32 [",
         sizes.batch, ", pages of a sequence]");
  const Tensor cache = run.input(kKeyCache);
  demand(cache.shape.size() == 4, "key_cache: shape ", cache.shape, ": must be [pages, page tokens, Hkv, d]");
  const std::int64_t capacity = table.shape[1] * cache.shape[1];
  demand(capacity <= INT32_MAX, "block_table: ", capacity, " tokens of a sequence: allowed up to 2147483647");
  const auto* const starts = cumulative.as<std::int32_t>();
  demand(starts[0] == 0 && starts[sizes.batch] == sizes.tokens, "cumulative_sequence_length: from ", starts[0], " to ",
         starts[sizes.batch], ": must be from 0 to the ", sizes.tokens, " tokens of query");
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const std::int64_t fresh = std::int64_t{starts[b + 1]} - starts[b];
    const std::int64_t total = fresh + past.as<std::int32_t>()[b];
    demand(fresh >= 0, "cumulative_sequence_length[", b + 1, "] = ", starts[b + 1], ": is below the one before");
    demand(total >= fresh && total <= capacity, "past_seqlens[", b, "] = ", total - fresh, ": with ", fresh,
           " new tokens allowed 0 to ", capacity - fresh);
    sizes.longest = std::max(sizes.longest, fresh);
    sizes.totals.push_back(static_cast<std::int32_t>(total));
  }
}

void PagedAttention::set_new_tokens(const Run& run, const Sizes& sizes, Problem& problem) const {
  const Tensor query = run.input(kQuery);
  const DType dtype = dtype_of(query.type, "query");
  problem.q = {.data = query.data, .dtype = dtype, .strides = bshd(0, sizes.width, sizes.head_dim)};
  if (sizes.packed) {
    problem.append.k = from_element(problem.q, q_heads_ * sizes.head_dim);
    problem.append.v = from_element(problem.append.k, kv_heads_ * sizes.head_dim);
    return;
  }
  const Strides rows = bshd(0, kv_heads_ * sizes.head_dim, sizes.head_dim);
  problem.append.k = {.data = run.input(kKey).data, .dtype = dtype, .strides = rows};
  problem.append.v = {.data = run.input(kValue).data, .dtype = dtype, .strides = rows};
}

/// The caches are written in place; an output that is other memory is made a copy of them first, and written instead.
void PagedAttention::set_pages(Run& run, const Sizes& sizes, Problem& problem) const {
  const Tensor table = run.input(kBlockTable);
  const Tensor first = run.input(kKeyCache);
  const Shape wanted{first.shape[0], first.shape[1], kv_heads_, sizes.head_dim};
  for (const auto& [view, in, out] :
       {std::tuple(&problem.k, kKeyCache, kKeyCacheOut), std::tuple(&problem.v, kValueCache, kValueCacheOut)}) {
    const Tensor cache = run.input(in);
    demand(cache.shape == wanted, kInputs[in].name, ": shape ", cache.shape, ": must be ", wanted);
    const Tensor given_out = run.output(out, wanted);
    const DType dtype = dtype_of(cache.type, kInputs[in].name);
    if (given_out && given_out.data != cache.data)
      std::memcpy(given_out.data, cache.data, static_cast<std::size_t>(cache.elements() * bytes_of(dtype)));
    *view = {.data = given_out ? given_out.data : cache.data,
             .dtype = dtype,
             .strides = bshd(wanted[1], kv_heads_ * sizes.head_dim, sizes.head_dim)};
  }
  problem.pages = {.page_tokens = static_cast<std::int32_t>(wanted[1]),
                   .page_count = wanted[0],
                   .block_table = table.as<std::int32_t>(),
                   .block_table_stride = table.shape[1]};
  problem.kv_capacity = static_cast<std::int32_t>(table.shape[1] * wanted[1]);
  if (bytes_of(problem.k.dtype) != 1) return;
  for (const auto& [scales, index] : {std::pair(&problem.k_scales, kKScale), std::pair(&problem.v_scales, kVScale)}) {
    const Tensor scale = run.input(index);
    demand(scale.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT && scale.elements() == 1, kInputs[index].name, ": is ", scale.type,
           " ", scale.shape, ": must be one float32");
    *scales = scale.as<float>();
  }
}

/// A slot mapping may say only what the lengths and the block table say.
void PagedAttention::check_slots(const Run& run, const Problem& problem, const Sizes& sizes) const {
  const Tensor slots = run.input(kSlotMapping);
  if (!slots) return;
  demand(slots.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && slots.shape == Shape{sizes.tokens}, "slot_mapping: is ", slots.type,
         " ", slots.shape, ": must be int32 [", sizes.tokens, "]");
  for (std::int64_t b = 0; b < sizes.batch; ++b)
    for (std::int64_t i = problem.cu_q_tokens[b]; i < problem.cu_q_tokens[b + 1]; ++i) {
      const std::int64_t token = sizes.totals[static_cast<std::size_t>(b)] - problem.cu_q_tokens[b + 1] + i;
      const std::int64_t page = problem.pages.block_table[b * problem.pages.block_table_stride + token / problem.pages.page_tokens];
      const std::int64_t slot = page * problem.pages.page_tokens + token % problem.pages.page_tokens;
      const std::int64_t given = slots.as<std::int32_t>()[i];
      do_not(given != slot, "slot_mapping[", i, "] = ", given, ": a token goes where block_table says, here ", slot);
    }
}

void PagedAttention::compute(Run& run) const {
  const Sizes sizes = sizes_of(run);
  Problem problem{.batch = sizes.batch,
                  .q_heads = static_cast<std::int32_t>(q_heads_),
                  .kv_heads = static_cast<std::int32_t>(kv_heads_),
                  .head_dim = static_cast<std::int32_t>(sizes.head_dim),
                  .q_tokens = static_cast<std::int32_t>(sizes.longest),
                  .cu_q_tokens = run.input(kCuSeqlens).as<std::int32_t>(),
                  .total_q_tokens = sizes.tokens,
                  .kv_lengths = sizes.totals.data()};
  set_new_tokens(run, sizes, problem);
  set_pages(run, sizes, problem);
  const Tensor output = run.output(kOutput, {sizes.tokens, q_heads_ * sizes.head_dim});
  if (sizes.tokens == 0) return;
  demand(problem.pages.page_tokens > 0, "key_cache: pages of 0 tokens");
  check_slots(run, problem, sizes);
  problem.o = {.data = output.data, .dtype = problem.q.dtype, .strides = bshd(0, q_heads_ * sizes.head_dim, sizes.head_dim)};
  problem.scores = {.scale = scale_, .causal = causal_, .softcap = softcap_};
  if (window_ > 0) problem.scores.window_left = static_cast<std::int32_t>(std::min<std::int64_t>(window_, INT32_MAX) - 1);
  std::vector<float> sinks;
  if (const Tensor sink = run.input(kHeadSink)) {
    demand(sink.shape == Shape{q_heads_}, "head_sink: shape ", sink.shape, ": must be [", q_heads_, "]");
    sinks = to_floats(sink, "head_sink");
    problem.scores.sinks = sinks.data();
  }
  if (rotary_) tables_.set(run, *std::max_element(sizes.totals.begin(), sizes.totals.end()), sizes.head_dim, problem.append);
  run.decode(problem);
}

}  // namespace

const OrtCustomOp& paged_attention() { return op<PagedAttention>(); }

}  // namespace lean::ort

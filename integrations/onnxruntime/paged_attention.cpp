// PagedAttention of com.microsoft: tokens of all sequences packed end to end, and caches of pages [pages, page_tokens, Hkv, d]
// that a block table deals out. New keys and values go into the pages, rotated on the way, and the queries attend to them, in
// one call.
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

constexpr GroupedInputs kGrouped{.query = kQuery,
                                 .key = kKey,
                                 .value = kValue,
                                 .k_cache = kKeyCache,
                                 .v_cache = kValueCache,
                                 .cos = kCos,
                                 .sin = kSin,
                                 .sink = kHeadSink,
                                 .k_scale = kKScale,
                                 .v_scale = kVScale,
                                 .q_norm = kQNorm,
                                 .k_norm = kKNorm,
                                 .k_cache_name = "key_cache",
                                 .v_cache_name = "value_cache",
                                 .causal_name = "is_causal"};

struct Sizes {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;      // of all sequences
  std::int64_t head_dim = 0;    // d
  std::int64_t most_fresh = 0;  // no sequence has more new tokens
  std::int64_t longest = 0;     // nor more of all

  const std::int32_t* totals = nullptr;     // tokens of each sequence, new ones included, where the node runs
  std::vector<std::int32_t> totals_read{};  // on the CPU
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
  [[nodiscard]] Sizes sizes_of(Run& run) const;
  void count_on_gpu(Run& run, Sizes& sizes) const;
  void read_lengths(const Run& run, std::int64_t capacity, Sizes& sizes) const;
  void set_pages(Run& run, const Sizes& sizes, Problem& problem) const;
  void check_slots(const Run& run, const Problem& problem, const Sizes& sizes) const;

  Grouped grouped_;
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

PagedAttention::PagedAttention(const Node& node) : grouped_(node, kGrouped) { check_node(node); }

void PagedAttention::check_node(const Node& node) const {
  const std::string layout = node.string("kv_cache_layout", "SEPARATE");
  do_not(layout != "SEPARATE" || !node.has_input(kValueCache), "kv_cache_layout = \"", layout,
         "\": allowed \"SEPARATE\", with value_cache");
  do_not(node.integer("v_head_size", 0) != 0, "v_head_size: goes with the LATENT layout, which is not read here");
  do_not(node.integer("rotary_offset", 0) != 0, "rotary_offset = ", node.integer("rotary_offset", 0), ": allowed 0");
  for (const char* const attribute : {"k_cache_dtype", "v_cache_dtype"}) {
    const std::string packing = node.string(attribute, "");
    do_not(packing == "int4" || packing == "int8" || packing == "float4e2m1", attribute, " = \"", packing,
           "\": allowed the type of query, or float8e4m3fn");
  }
  do_not(node.on_gpu() && node.has_input(kSlotMapping),
         "slot_mapping: a token goes where block_table says, and slots on a GPU are not compared with that: leave them away");
}

Sizes PagedAttention::sizes_of(Run& run) const {
  const Tensor query = run.input(kQuery);
  demand(query.shape.size() == 2, "query: shape ", query.shape, ": must be [tokens, width]");
  Sizes sizes{.tokens = query.shape[0]};
  sizes.head_dim = grouped_.head_dim_of(query.shape[1], !run.input(kKey));
  grouped_.check_key_and_value(run, query, {sizes.tokens, grouped_.kv_heads() * sizes.head_dim});
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
  demand(capacity <= INT32_MAX && sizes.tokens <= INT32_MAX, "block_table: ", capacity,
         " tokens of a sequence: allowed up to 2147483647");
  if (run.on_gpu())
    count_on_gpu(run, sizes);
  else
    read_lengths(run, capacity, sizes);
  return sizes;
}

/// For all the host knows without the hint, one sequence may bring all new tokens.
void PagedAttention::count_on_gpu(Run& run, Sizes& sizes) const {
  sizes.totals = run.scratch_of<std::int32_t>(sizes.batch);  // counted by the call
  sizes.most_fresh = sizes.tokens;
  const Tensor bounds = run.input(kMetadata);
  if (!bounds) return;
  demand(bounds.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && bounds.elements() >= 2, "attention_metadata: is ", bounds.type, " ",
         bounds.shape, ": must be int32 [2] or [3]");
  const std::int64_t given = *bounds.as<std::int32_t>();  // 0: not known
  if (given > 0) sizes.most_fresh = std::min(sizes.most_fresh, given);
}

void PagedAttention::read_lengths(const Run& run, std::int64_t capacity, Sizes& sizes) const {
  const auto* const starts = run.input(kCuSeqlens).as<std::int32_t>();
  const auto* const past = run.input(kPastSeqlens).as<std::int32_t>();
  demand(starts[0] == 0 && starts[sizes.batch] == sizes.tokens, "cumulative_sequence_length: from ", starts[0], " to ",
         starts[sizes.batch], ": must be from 0 to the ", sizes.tokens, " tokens of query");
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const std::int64_t fresh = std::int64_t{starts[b + 1]} - starts[b];
    const std::int64_t total = fresh + past[b];
    demand(fresh >= 0, "cumulative_sequence_length[", b + 1, "] = ", starts[b + 1], ": is below the one before");
    demand(total >= fresh && total <= capacity, "past_seqlens[", b, "] = ", total - fresh, ": with ", fresh,
           " new tokens allowed 0 to ", capacity - fresh);
    sizes.most_fresh = std::max(sizes.most_fresh, fresh);
    sizes.longest = std::max(sizes.longest, total);
    sizes.totals_read.push_back(static_cast<std::int32_t>(total));
  }
  sizes.totals = sizes.totals_read.data();
}

/// The caches are written in place; an output that is other memory is made a copy of them first, and written instead.
void PagedAttention::set_pages(Run& run, const Sizes& sizes, Problem& problem) const {
  const Tensor table = run.input(kBlockTable);
  const Tensor first = run.input(kKeyCache);
  const Shape wanted{first.shape[0], first.shape[1], grouped_.kv_heads(), sizes.head_dim};
  for (const auto& [view, in, out] :
       {std::tuple(&problem.k, kKeyCache, kKeyCacheOut), std::tuple(&problem.v, kValueCache, kValueCacheOut)}) {
    const Tensor cache = run.input(in);
    demand(cache.shape == wanted, kInputs[in].name, ": shape ", cache.shape, ": must be ", wanted);
    const Tensor given_out = run.output(out, wanted);
    const DType dtype = dtype_of(cache.type, kInputs[in].name);
    const auto bytes = static_cast<std::size_t>(cache.elements() * bytes_of(dtype));
    if (given_out && given_out.data != cache.data) run.copy(cache.data, given_out.data, bytes);
    *view = {.data = given_out ? given_out.data : cache.data,
             .dtype = dtype,
             .strides = bshd(wanted[1], grouped_.kv_heads() * sizes.head_dim, sizes.head_dim)};
  }
  problem.pages = {.page_tokens = static_cast<std::int32_t>(wanted[1]),
                   .page_count = wanted[0],
                   .block_table = table.as<std::int32_t>(),
                   .block_table_stride = table.shape[1]};
  problem.kv_capacity = static_cast<std::int32_t>(table.shape[1] * wanted[1]);
  grouped_.set_scales(run, problem);
}

/// A slot mapping may say only what the lengths and the block table say.
void PagedAttention::check_slots(const Run& run, const Problem& problem, const Sizes& sizes) const {
  const Tensor slots = run.input(kSlotMapping);
  if (!slots || run.on_gpu()) return;
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
                  .q_heads = static_cast<std::int32_t>(grouped_.q_heads()),
                  .kv_heads = static_cast<std::int32_t>(grouped_.kv_heads()),
                  .head_dim = static_cast<std::int32_t>(sizes.head_dim),
                  .q_tokens = static_cast<std::int32_t>(sizes.most_fresh),
                  .cu_q_tokens = run.input(kCuSeqlens).as<std::int32_t>(),
                  .total_q_tokens = sizes.tokens,
                  .kv_lengths = sizes.totals};
  grouped_.set_new_tokens(run, 0, problem);
  if (run.on_gpu()) problem.append.cached_lengths = run.input(kPastSeqlens).as<std::int32_t>();
  set_pages(run, sizes, problem);
  const std::int64_t width = grouped_.q_heads() * sizes.head_dim;
  const Tensor output = run.output(kOutput, {sizes.tokens, width});
  if (sizes.tokens == 0) return;
  demand(problem.pages.page_tokens > 0, "key_cache: pages of 0 tokens");
  check_slots(run, problem, sizes);
  problem.o = {.data = output.data, .dtype = problem.q.dtype, .strides = bshd(0, width, sizes.head_dim)};
  grouped_.set_scores(run, problem);
  grouped_.set_rotary(run, sizes.longest, problem);
  run.decode(problem);
}

}  // namespace

Ops paged_attention() { return ops<PagedAttention>(); }

}  // namespace lean::ort

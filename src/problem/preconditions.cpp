// The table of what a problem must keep whatever the backend, a row a precondition, in the order in which they are looked at.
#include "problem/preconditions.hpp"

#include <array>
#include <cmath>

#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "lean/dtypes.hpp"
#include "problem/append.hpp"
#include "problem/extents.hpp"
#include "problem/pages.hpp"

namespace lean {
namespace {

using P = const Problem&;

constexpr std::int64_t kMaxInt32 = INT32_MAX;

// What the schedule computes with: cost units of the whole line stay below 2^52, exact in a double as well.
constexpr std::int64_t kMaxLineWork = std::int64_t{1} << 46;

constexpr std::int64_t as_int(DType dtype) noexcept { return static_cast<std::int64_t>(dtype); }
std::int64_t as_int(const void* pointer) noexcept { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }
bool aligned(const void* data, DType dtype) noexcept { return aligned_to(data, bytes_of(dtype)); }
bool aligned(const std::int32_t* data) noexcept { return aligned_to(data, sizeof(std::int32_t)); }

bool has_queries(P p) noexcept { return p.batch > 0 && (p.cu_q_tokens == nullptr || p.total_q_tokens > 0); }
bool has_keys(P p) noexcept { return has_queries(p) && p.kv_capacity > 0 && (p.cu_kv_tokens == nullptr || p.total_kv_tokens > 0); }
bool paged(P p) noexcept { return is_paged(p.pages); }

bool has_additive_mask(P p) noexcept { return p.scores.mask != nullptr && !p.scores.mask_is_boolean; }

Strides lse_strides(P p) noexcept { return {p.lse.sequence_stride, p.lse.head_stride, p.lse.token_stride, 0}; }

/// Upper bound of row x token pairs over the whole line; -1 when it leaves 64 bits.
std::int64_t line_work(P p) noexcept {
  const std::int64_t q_tokens = p.cu_q_tokens != nullptr ? p.total_q_tokens + p.batch : checked_product(p.batch, p.q_tokens);
  if (q_tokens < 0) return -1;
  // A tile is at least 16 tokens of one row block; rows are counted singly, which only overestimates.
  return checked_product(checked_product(q_tokens, p.q_heads), ceil_div(p.kv_capacity, 16) + 1);
}

/// The most packed rows of a kv head that any lengths give it; -1 when they leave 64 bits.
std::int64_t rows_of_head(P p) noexcept {
  const std::int32_t q_tokens =
      p.cu_q_tokens != nullptr ? static_cast<std::int32_t>(min_of(p.q_tokens, p.total_q_tokens)) : p.q_tokens;
  return checked_product(q_tokens, p.q_heads / p.kv_heads);
}

/// Rows of all sequences, were each as long as the capacities let one be: what workspaces and launches are laid out for.
std::int64_t row_capacity(P p) noexcept { return checked_product(checked_product(p.batch, p.q_tokens), p.q_heads); }

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr auto kTooLarge = StatusCode::kTooLarge;

static_assert(kMaxHeadDim == 576, "the texts of head_dim and value_dim below say it");

// clang-format off: one row, one precondition
constexpr std::array kRows = {
    Precondition<Problem>{kInvalid, "batch", "allowed 0 to 2147483647",
                 [](P p) noexcept -> std::int64_t { return p.batch; },
                 [](P p) noexcept { return p.batch >= 0 && p.batch <= kMaxInt32; }},
    Precondition<Problem>{kInvalid, "q_heads", "allowed 1 or more",
                 [](P p) noexcept -> std::int64_t { return p.q_heads; },
                 [](P p) noexcept { return p.q_heads >= 1; }},
    Precondition<Problem>{kInvalid, "kv_heads", "allowed 1 or more",
                 [](P p) noexcept -> std::int64_t { return p.kv_heads; },
                 [](P p) noexcept { return p.kv_heads >= 1; }},
    Precondition<Problem>{kInvalid, "q_heads", "must be a multiple of kv_heads",
                 [](P p) noexcept -> std::int64_t { return p.q_heads; },
                 [](P p) noexcept { return p.q_heads % p.kv_heads == 0; }},
    Precondition<Problem>{kInvalid, "head_dim", "allowed 1 to 576",
                 [](P p) noexcept -> std::int64_t { return p.head_dim; },
                 [](P p) noexcept { return p.head_dim >= 1 && p.head_dim <= kMaxHeadDim; }},
    Precondition<Problem>{kInvalid, "value_dim", "allowed 1 to 576, or 0 for head_dim",
                 [](P p) noexcept -> std::int64_t { return p.value_dim; },
                 [](P p) noexcept { return p.value_dim >= 0 && p.value_dim <= kMaxHeadDim; }},
    Precondition<Problem>{kInvalid, "q_tokens", "allowed 1 or more",
                 [](P p) noexcept -> std::int64_t { return p.q_tokens; },
                 [](P p) noexcept { return p.q_tokens >= 1; }},
    Precondition<Problem>{kInvalid, "total_q_tokens", "allowed 0 to 2147483647 with cu_q_tokens, else 0",
                 [](P p) noexcept -> std::int64_t { return p.total_q_tokens; },
                 [](P p) noexcept { return p.total_q_tokens >= 0 &&
                                           p.total_q_tokens <= (p.cu_q_tokens != nullptr ? kMaxInt32 : 0); }},
    Precondition<Problem>{kInvalid, "kv_capacity", "allowed 0 or more",
                 [](P p) noexcept -> std::int64_t { return p.kv_capacity; },
                 [](P p) noexcept { return p.kv_capacity >= 0; }},
    Precondition<Problem>{kInvalid, "total_kv_tokens", "allowed 0 to 2147483647 with cu_kv_tokens, else 0",
                 [](P p) noexcept -> std::int64_t { return p.total_kv_tokens; },
                 [](P p) noexcept { return p.total_kv_tokens >= 0 &&
                                           p.total_kv_tokens <= (p.cu_kv_tokens != nullptr ? kMaxInt32 : 0); }},
    Precondition<Problem>{kInvalid, "q.dtype", "allowed float32, float16, bfloat16",
                 [](P p) noexcept -> std::int64_t { return as_int(p.q.dtype); },
                 [](P p) noexcept { return traits_of(p.q.dtype).of_queries(); }},
    Precondition<Problem>{kInvalid, "o.dtype", "must equal q.dtype",
                 [](P p) noexcept -> std::int64_t { return as_int(p.o.dtype); },
                 [](P p) noexcept { return p.o.dtype == p.q.dtype; }},
    Precondition<Problem>{kInvalid, "k.dtype", "must equal q.dtype, or be float8",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k.dtype); },
                 [](P p) noexcept { return p.k.dtype == p.q.dtype || traits_of(p.k.dtype).scaled; }},
    Precondition<Problem>{kInvalid, "v.dtype", "must equal k.dtype",
                 [](P p) noexcept -> std::int64_t { return as_int(p.v.dtype); },
                 [](P p) noexcept { return p.v.dtype == p.k.dtype; }},
    Precondition<Problem>{kInvalid, "q.data", "must not be null",
                 [](P p) noexcept -> std::int64_t { return as_int(p.q.data); },
                 [](P p) noexcept { return !has_queries(p) || p.q.data != nullptr; }},
    Precondition<Problem>{kInvalid, "o.data", "must not be null",
                 [](P p) noexcept -> std::int64_t { return as_int(p.o.data); },
                 [](P p) noexcept { return !has_queries(p) || p.o.data != nullptr; }},
    Precondition<Problem>{kInvalid, "k.data", "must not be null when kv_capacity > 0",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k.data); },
                 [](P p) noexcept { return !has_keys(p) || p.k.data != nullptr; }},
    Precondition<Problem>{kInvalid, "v.data", "must not be null when kv_capacity > 0",
                 [](P p) noexcept -> std::int64_t { return as_int(p.v.data); },
                 [](P p) noexcept { return !has_keys(p) || p.v.data != nullptr; }},
    Precondition<Problem>{kInvalid, "kv_capacity",
                 "must be 1 or more where k.data or v.data is given: null both for sequences without a key",
                 [](P p) noexcept -> std::int64_t { return p.kv_capacity; },
                 [](P p) noexcept { return !has_queries(p) || p.kv_capacity > 0 || (p.k.data == nullptr && p.v.data == nullptr); }},
    Precondition<Problem>{kInvalid, "q.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.q.data); },
                 [](P p) noexcept { return aligned(p.q.data, p.q.dtype); }},
    Precondition<Problem>{kInvalid, "k.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k.data); },
                 [](P p) noexcept { return aligned(p.k.data, p.k.dtype); }},
    Precondition<Problem>{kInvalid, "v.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.v.data); },
                 [](P p) noexcept { return aligned(p.v.data, p.v.dtype); }},
    Precondition<Problem>{kInvalid, "o.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.o.data); },
                 [](P p) noexcept { return aligned(p.o.data, p.o.dtype); }},
    Precondition<Problem>{kInvalid, "lse.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.lse.data); },
                 [](P p) noexcept { return aligned(p.lse.data, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "cu_q_tokens", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.cu_q_tokens); },
                 [](P p) noexcept { return aligned(p.cu_q_tokens); }},
    Precondition<Problem>{kInvalid, "cu_kv_tokens", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.cu_kv_tokens); },
                 [](P p) noexcept { return aligned(p.cu_kv_tokens); }},
    Precondition<Problem>{kInvalid, "kv_lengths", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.kv_lengths); },
                 [](P p) noexcept { return aligned(p.kv_lengths); }},
    Precondition<Problem>{kInvalid, "kv_left_pad", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.kv_left_pad); },
                 [](P p) noexcept { return aligned(p.kv_left_pad); }},
    Precondition<Problem>{kInvalid, "o.data", "must not be q.data: outputs may be written before the last query is read",
                 [](P p) noexcept -> std::int64_t { return as_int(p.o.data); },
                 [](P p) noexcept { return p.o.data == nullptr || p.o.data != p.q.data; }},
    Precondition<Problem>{kInvalid, "o.data", "must not be k.data or v.data, nor append's",
                 [](P p) noexcept -> std::int64_t { return as_int(p.o.data); },
                 [](P p) noexcept { return p.o.data == nullptr ||
                                           (p.o.data != p.k.data && p.o.data != p.v.data && p.o.data != p.append.k.data &&
                                            p.o.data != p.append.v.data); }},
    Precondition<Problem>{kInvalid, "lse.data", "must not be o.data, q.data, k.data or v.data, nor append's",
                 [](P p) noexcept -> std::int64_t { return as_int(p.lse.data); },
                 [](P p) noexcept { return p.lse.data == nullptr || !has_queries(p) ||
                                           (p.lse.data != p.o.data && p.lse.data != p.q.data && p.lse.data != p.k.data &&
                                            p.lse.data != p.v.data && p.lse.data != p.append.k.data &&
                                            p.lse.data != p.append.v.data); }},
    Precondition<Problem>{kTooLarge, "q.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.q.strides.token; },
                 [](P p) noexcept { return addressable(query_extents(p, p.head_dim), p.q.strides); }},
    Precondition<Problem>{kTooLarge, "o.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.o.strides.token; },
                 [](P p) noexcept { return addressable(query_extents(p, value_dim_of(p)), p.o.strides); }},
    Precondition<Problem>{kTooLarge, "k.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.k.strides.token; },
                 [](P p) noexcept { return addressable(key_extents(p, p.head_dim), p.k.strides); }},
    Precondition<Problem>{kTooLarge, "v.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.v.strides.token; },
                 [](P p) noexcept { return addressable(key_extents(p, value_dim_of(p)), p.v.strides); }},
    Precondition<Problem>{kTooLarge, "lse.token_stride", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.lse.token_stride; },
                 [](P p) noexcept { return addressable(query_extents(p, 1), lse_strides(p)); }},
    Precondition<Problem>{kInvalid, "o.strides", "no stride may be 0 on an axis longer than 1: outputs must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.o.strides.token; },
                 [](P p) noexcept { return !has_queries(p) || moves(query_extents(p, value_dim_of(p)), p.o.strides); }},
    Precondition<Problem>{kInvalid, "lse.token_stride", "no stride may be 0 on an axis longer than 1: outputs must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.lse.token_stride; },
                 [](P p) noexcept { return p.lse.data == nullptr || !has_queries(p) ||
                                           moves(query_extents(p, 1), lse_strides(p)); }},
    Precondition<Problem>{kTooLarge, "batch x q_heads x q_tokens x kv_capacity", "at most 2^46 row-tile pairs",
                 [](P p) noexcept -> std::int64_t { return p.batch; },
                 [](P p) noexcept { return line_work(p) >= 0 && line_work(p) <= kMaxLineWork; }},
    Precondition<Problem>{kTooLarge, "q_tokens x q_heads / kv_heads", "at most 2147483647 rows of a kv head",
                 [](P p) noexcept -> std::int64_t { return p.q_tokens; },
                 [](P p) noexcept { return rows_of_head(p) >= 0 && rows_of_head(p) <= kMaxInt32; }},
    Precondition<Problem>{kTooLarge, "batch x q_heads x q_tokens", "at most 2^46 rows, which times kv_capacity must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.batch; },
                 [](P p) noexcept { return row_capacity(p) >= 0 && row_capacity(p) <= kMaxLineWork &&
                                           checked_product(row_capacity(p), p.kv_capacity) >= 0; }},
    Precondition<Problem>{kInvalid, "o.strides", "no two axes may meet: outputs must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.o.strides.token; },
                 [](P p) noexcept { return !has_queries(p) || distinct(query_extents(p, value_dim_of(p)), p.o.strides); }},
    Precondition<Problem>{kInvalid, "lse.token_stride", "no two axes may meet: outputs must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.lse.token_stride; },
                 [](P p) noexcept { return p.lse.data == nullptr || !has_queries(p) ||
                                           distinct(query_extents(p, 1), lse_strides(p)); }},
    Precondition<Problem>{kInvalid, "scores.scale", "must be finite",
                 nullptr,
                 [](P p) noexcept { return std::isfinite(p.scores.scale); },
                 [](P p) noexcept -> double { return p.scores.scale; }},
    Precondition<Problem>{kInvalid, "scores.scale", "allowed -1e38 to 1e38: times log2(e) it must be finite",
                 nullptr,
                 [](P p) noexcept { return std::abs(p.scores.scale) <= 1e38F; },
                 [](P p) noexcept -> double { return p.scores.scale; }},
    Precondition<Problem>{kInvalid, "scores.scale", "allowed 0, -0, or a size of 1e-37 or more: a smaller number loses digits in fp32",
                 nullptr,
                 [](P p) noexcept { return p.scores.scale == 0.0F || std::abs(p.scores.scale) >= 1e-37F; },
                 [](P p) noexcept -> double { return p.scores.scale; }},
    Precondition<Problem>{kInvalid, "scores.softcap", "allowed 0 (none) or 1e-30 to 1e30",
                 nullptr,
                 [](P p) noexcept { return p.scores.softcap == 0.0F || (p.scores.softcap >= 1e-30F && p.scores.softcap <= 1e30F); },
                 [](P p) noexcept -> double { return p.scores.softcap; }},
    Precondition<Problem>{kInvalid, "scores.window_left", "allowed -1 (all) or more",
                 [](P p) noexcept -> std::int64_t { return p.scores.window_left; },
                 [](P p) noexcept { return p.scores.window_left >= -1; }},
    Precondition<Problem>{kInvalid, "scores.window_right", "allowed -1 (all) or more",
                 [](P p) noexcept -> std::int64_t { return p.scores.window_right; },
                 [](P p) noexcept { return p.scores.window_right >= -1; }},
    Precondition<Problem>{kInvalid, "scores.alibi_slopes", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.scores.alibi_slopes); },
                 [](P p) noexcept { return aligned(p.scores.alibi_slopes, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "scores.alibi_sequence_stride", "allowed 0 or more",
                 [](P p) noexcept -> std::int64_t { return p.scores.alibi_sequence_stride; },
                 [](P p) noexcept { return p.scores.alibi_slopes == nullptr || p.scores.alibi_sequence_stride >= 0; }},
    Precondition<Problem>{kTooLarge, "scores.alibi_sequence_stride", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.scores.alibi_sequence_stride; },
                 [](P p) noexcept { return p.scores.alibi_slopes == nullptr ||
                                           addressable({p.batch, 0, 0, 0}, {.sequence = p.scores.alibi_sequence_stride}); }},
    Precondition<Problem>{kInvalid, "scores.sinks", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.scores.sinks); },
                 [](P p) noexcept { return aligned(p.scores.sinks, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "scores.mask_dtype", "allowed float32, float16, bfloat16 for an additive mask",
                 [](P p) noexcept -> std::int64_t { return as_int(p.scores.mask_dtype); },
                 [](P p) noexcept { return !has_additive_mask(p) || traits_of(p.scores.mask_dtype).of_queries(); }},
    Precondition<Problem>{kInvalid, "scores.mask", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.scores.mask); },
                 [](P p) noexcept { return !has_additive_mask(p) || aligned(p.scores.mask, p.scores.mask_dtype); }},
    Precondition<Problem>{kTooLarge, "scores.mask_strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.scores.mask_strides.token; },
                 [](P p) noexcept { return p.scores.mask == nullptr ||
                                           addressable({p.batch, p.q_heads, p.q_tokens, p.kv_capacity}, p.scores.mask_strides); }},
    Precondition<Problem>{kInvalid, "scores.tree_mask", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.scores.tree_mask); },
                 [](P p) noexcept { return aligned(p.scores.tree_mask, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "pages.page_tokens", "allowed 0 (not paged) or more",
                 [](P p) noexcept -> std::int64_t { return p.pages.page_tokens; },
                 [](P p) noexcept { return p.pages.page_tokens >= 0; }},
    Precondition<Problem>{kInvalid, "cu_kv_tokens", "must be null with paged K/V",
                 [](P p) noexcept -> std::int64_t { return as_int(p.cu_kv_tokens); },
                 [](P p) noexcept { return !paged(p) || p.cu_kv_tokens == nullptr; }},
    Precondition<Problem>{kInvalid, "pages.block_table", "exactly one of block_table and (page_indptr, page_indices) must be given",
                 [](P p) noexcept -> std::int64_t { return as_int(p.pages.block_table); },
                 [](P p) noexcept { return !paged(p) || (p.pages.block_table != nullptr) !=
                                           (p.pages.page_indptr != nullptr && p.pages.page_indices != nullptr); }},
    Precondition<Problem>{kInvalid, "pages.block_table", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.pages.block_table); },
                 [](P p) noexcept { return !paged(p) || aligned(p.pages.block_table); }},
    Precondition<Problem>{kInvalid, "pages.page_indptr", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.pages.page_indptr); },
                 [](P p) noexcept { return !paged(p) || aligned(p.pages.page_indptr); }},
    Precondition<Problem>{kInvalid, "pages.page_indices", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.pages.page_indices); },
                 [](P p) noexcept { return !paged(p) || aligned(p.pages.page_indices); }},
    Precondition<Problem>{kInvalid, "pages.page_count", "allowed 1 to 2147483647 with paged K/V, 0 too where kv_capacity is 0",
                 [](P p) noexcept -> std::int64_t { return p.pages.page_count; },
                 [](P p) noexcept { return !paged(p) || (p.pages.page_count >= (has_keys(p) ? 1 : 0) && p.pages.page_count <= kMaxInt32); }},
    Precondition<Problem>{kInvalid, "pages.block_table_stride", "allowed 0 or more",
                 [](P p) noexcept -> std::int64_t { return p.pages.block_table_stride; },
                 [](P p) noexcept { return !paged(p) || p.pages.block_table_stride >= 0; }},
    Precondition<Problem>{kInvalid, "pages.block_table_stride",
                 "must be 1 or more where several sequences have keys: they do not share a row",
                 [](P p) noexcept -> std::int64_t { return p.pages.block_table_stride; },
                 [](P p) noexcept { return !paged(p) || p.pages.block_table == nullptr || p.batch <= 1 || !has_keys(p) ||
                                           p.pages.block_table_stride > 0; }},
    Precondition<Problem>{kInvalid, "kv_capacity",
                 "a row of pages.block_table has fewer pages: allowed up to block_table_stride x page_tokens",
                 [](P p) noexcept -> std::int64_t { return p.kv_capacity; },
                 [](P p) noexcept { return !paged(p) || p.pages.block_table == nullptr || p.batch <= 1 || !has_keys(p) ||
                                           ceil_div(p.kv_capacity, p.pages.page_tokens) <= p.pages.block_table_stride; }},
    Precondition<Problem>{kInvalid, "kv_lengths", "must be given with pages.block_table: rows of a table are longer than sequences",
                 [](P p) noexcept -> std::int64_t { return as_int(p.kv_lengths); },
                 [](P p) noexcept { return !paged(p) || p.pages.block_table == nullptr || !has_keys(p) ||
                                           p.kv_lengths != nullptr; }},
    Precondition<Problem>{kTooLarge, "pages.block_table_stride", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.pages.block_table_stride; },
                 [](P p) noexcept { return !paged(p) ||
                                           addressable({p.batch, 0, 0, 0}, {.sequence = p.pages.block_table_stride}); }},
    Precondition<Problem>{kInvalid, "append.v.data", "append.k and append.v must both be given or both be null",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.v.data); },
                 [](P p) noexcept { return (p.append.k.data == nullptr) == (p.append.v.data == nullptr); }},
    Precondition<Problem>{kInvalid, "kv_lengths",
                 "must be given with append, or cu_kv_tokens or pages.page_indptr: new tokens are the last of a sequence",
                 [](P p) noexcept -> std::int64_t { return as_int(p.kv_lengths); },
                 [](P p) noexcept { return !appends(p) || !has_keys(p) || p.kv_lengths != nullptr ||
                                           p.cu_kv_tokens != nullptr || (paged(p) && p.pages.page_indptr != nullptr); }},
    Precondition<Problem>{kInvalid, "append.cached_lengths", "must be null where nothing is appended",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.cached_lengths); },
                 [](P p) noexcept { return p.append.cached_lengths == nullptr || appends(p); }},
    Precondition<Problem>{kInvalid, "append.cached_lengths", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.cached_lengths); },
                 [](P p) noexcept { return aligned(p.append.cached_lengths); }},
    Precondition<Problem>{kInvalid, "append.cached_lengths", "needs kv_lengths, another array, which the call writes",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.cached_lengths); },
                 [](P p) noexcept { return p.append.cached_lengths == nullptr ||
                                           (p.kv_lengths != nullptr &&
                                            !overlap(p.kv_lengths, p.batch * bytes_of(DType::kFloat32),
                                                     p.append.cached_lengths, p.batch * bytes_of(DType::kFloat32))); }},
    Precondition<Problem>{kInvalid, "append.k.dtype", "must equal q.dtype",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.k.dtype); },
                 [](P p) noexcept { return !appends(p) || p.append.k.dtype == p.q.dtype; }},
    Precondition<Problem>{kInvalid, "append.v.dtype", "must equal q.dtype",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.v.dtype); },
                 [](P p) noexcept { return !appends(p) || p.append.v.dtype == p.q.dtype; }},
    Precondition<Problem>{kInvalid, "append.k.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.k.data); },
                 [](P p) noexcept { return !appends(p) || aligned(p.append.k.data, p.append.k.dtype); }},
    Precondition<Problem>{kInvalid, "append.v.data", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.v.data); },
                 [](P p) noexcept { return !appends(p) || aligned(p.append.v.data, p.append.v.dtype); }},
    Precondition<Problem>{kTooLarge, "append.k.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.append.k.strides.token; },
                 [](P p) noexcept { return !appends(p) || addressable(new_key_extents(p, p.head_dim), p.append.k.strides); }},
    Precondition<Problem>{kTooLarge, "append.v.strides", "every byte offset must fit 63 bits",
                 [](P p) noexcept -> std::int64_t { return p.append.v.strides.token; },
                 [](P p) noexcept { return !appends(p) || addressable(new_key_extents(p, value_dim_of(p)), p.append.v.strides); }},
    Precondition<Problem>{kInvalid, "k.strides",
                 "with append no stride may be 0 on an axis longer than 1: new keys must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.k.strides.token; },
                 [](P p) noexcept { return !appends(p) || !has_keys(p) || moves(key_extents(p, p.head_dim), p.k.strides); }},
    Precondition<Problem>{kInvalid, "v.strides",
                 "with append no stride may be 0 on an axis longer than 1: new values must not overlap",
                 [](P p) noexcept -> std::int64_t { return p.v.strides.token; },
                 [](P p) noexcept { return !appends(p) || !has_keys(p) ||
                                           moves(key_extents(p, value_dim_of(p)), p.v.strides); }},
    Precondition<Problem>{kInvalid, "v.data", "with append must not be k.data",
                 [](P p) noexcept -> std::int64_t { return as_int(p.v.data); },
                 [](P p) noexcept { return !appends(p) || !has_keys(p) || p.k.data != p.v.data; }},
    Precondition<Problem>{kInvalid, "append.rotary_dim", "allowed 0 or an even number up to head_dim",
                 [](P p) noexcept -> std::int64_t { return p.append.rotary_dim; },
                 [](P p) noexcept { return p.append.rotary_dim >= 0 && p.append.rotary_dim % 2 == 0 &&
                                           p.append.rotary_dim <= p.head_dim; }},
    Precondition<Problem>{kInvalid, "append.rotary_cos", "rotary_cos and rotary_sin must be given when rotary_dim > 0",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.rotary_cos); },
                 [](P p) noexcept { return p.append.rotary_dim == 0 ||
                                           (p.append.rotary_cos != nullptr && p.append.rotary_sin != nullptr); }},
    Precondition<Problem>{kInvalid, "append.rotary_dim", "must be 0 where nothing is appended",
                 [](P p) noexcept -> std::int64_t { return p.append.rotary_dim; },
                 [](P p) noexcept { return p.append.rotary_dim == 0 || appends(p); }},
    Precondition<Problem>{kInvalid, "append.rotary_cos", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.rotary_cos); },
                 [](P p) noexcept { return aligned(p.append.rotary_cos, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "append.rotary_sin", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.append.rotary_sin); },
                 [](P p) noexcept { return aligned(p.append.rotary_sin, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "k_scales", "k_scales and v_scales are for float8 K/V only",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k_scales); },
                 [](P p) noexcept { return traits_of(p.k.dtype).scaled || (p.k_scales == nullptr && p.v_scales == nullptr); }},
    Precondition<Problem>{kInvalid, "k_scales", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.k_scales); },
                 [](P p) noexcept { return aligned(p.k_scales, DType::kFloat32); }},
    Precondition<Problem>{kInvalid, "v_scales", "must be aligned to its element size",
                 [](P p) noexcept -> std::int64_t { return as_int(p.v_scales); },
                 [](P p) noexcept { return aligned(p.v_scales, DType::kFloat32); }},
};
// clang-format on

}  // namespace

PreconditionTable<Problem> problem_preconditions() noexcept { return {kRows.data(), kRows.size()}; }

}  // namespace lean

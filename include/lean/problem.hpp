// Problem: everything a decode-attention call may ask, as one struct of plain values and pointers.
//
// Letters used throughout (docs/glossary.md):
//   B sequences, Hq query heads, Hkv key/value heads, G = Hq/Hkv, n_q query tokens and n_kv key/value tokens of
//   one sequence, d = head_dim of q and k, dv = value_dim of v and o.
// Strides are in elements, 64-bit. The library owns nothing: every pointer must stay valid until the call is done
// (for a GPU backend: until the stream has passed the call). Lengths are int32 and may live on the device.
// Fields a backend does not serve yet are refused by supports() with a reason; nothing is ever ignored.
#pragma once

#include <cstdint>

namespace lean {

/// Widest head_dim and value_dim: multi-head latent attention has keys of 576 dims. A backend may serve less, and says so.
inline constexpr std::int32_t kMaxHeadDim = 576;

/// The type of a tensor's elements. fp8 is for K and V only.
enum class DType : std::int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4,
};

/// Bytes of one element; 0 for a value outside the enumeration.
[[nodiscard]] constexpr std::int64_t bytes_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return 1;
  }
  return 0;
}

/// Where element (sequence, head, token, dim) lies: data + the sum of index x stride. With cumulative lengths
/// `sequence` is not used (token counts from the start of the packed tensor); with pages `sequence` is the stride
/// from one page to the next and `token` counts inside a page. A stride of 0 broadcasts, a negative one walks back.
struct Strides {
  std::int64_t sequence = 0;  // elements
  std::int64_t head = 0;      // elements
  std::int64_t token = 0;     // elements
  std::int64_t dim = 1;       // elements
};

/// An input tensor. `data` must be aligned to its element size.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  Strides strides{};
};

/// An output tensor. Its elements must not overlap each other or any input.
struct OutputView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Strides strides{};
};

/// Log-sum-exp of every (sequence, query head, query token): fp32, natural logarithm. Null data: not wanted.
struct LseView {
  float* data = nullptr;
  std::int64_t sequence_stride = 0;  // elements; not used with cumulative query lengths
  std::int64_t head_stride = 0;      // elements
  std::int64_t token_stride = 0;     // elements
};

/// Paged K/V: page `p` of sequence `b` is block_table[b * block_table_stride + p], or page_indices[page_indptr[b] + p]. Entries
/// past a sequence's last page may hold anything. A page may serve several sequences. Tokens of a page whose id lies outside the
/// pool are skipped (sticky code). With CSR a sequence has at most its pages' tokens: lengths come from kv_lengths, so from a
/// last page's length it is (pages - 1) page_tokens + that.
struct PagedKv {
  std::int32_t page_tokens = 0;                // tokens a page holds; 0: K/V is not paged
  std::int64_t page_count = 0;                 // pages in the pool; valid ids are [0, page_count)
  const std::int32_t* block_table = nullptr;   // [B, block_table_stride]
  std::int64_t block_table_stride = 0;         // elements; for several sequences ceil(kv_capacity / page_tokens) or more
  const std::int32_t* page_indptr = nullptr;   // [B + 1], CSR form
  const std::int32_t* page_indices = nullptr;  // [page_indptr[B]]
};

/// Which keys a query sees, and what is added to or done with a score before the softmax: scale, softcap, ALiBi, mask, in this
/// order. Query token i of n_q stands at position n_kv - n_q + i. A key is seen if every rule lets it be seen.
struct Scores {
  float scale = 0.0F;                   // multiplies q k; 0 means 1 / sqrt(head_dim), -0 the number 0
  bool causal = false;                  // bottom-right: query i of n_q sees keys up to n_kv - n_q + i
  std::int32_t window_left = -1;        // keys to the left of the query's own position; -1: all
  std::int32_t window_right = -1;       // keys to the right; -1: all
  float softcap = 0.0F;                 // s -> softcap tanh(s / softcap), 1e-30 to 1e30; 0: none
  const float* alibi_slopes = nullptr;  // [Hq] or [B, Hq]: s -> s - slope x distance of the two positions (arXiv 2108.12409)
  const float* sinks = nullptr;         // [Hq], natural-log logits that take part in the denominator only
  const void* mask = nullptr;           // additive (mask_dtype) or boolean (mask_is_boolean) mask; -inf hides a key
  DType mask_dtype = DType::kFloat32;
  bool mask_is_boolean = false;              // bytes: nonzero = seen
  Strides mask_strides{};                    // (sequence, head, query token = token, key = dim)
  const std::uint32_t* tree_mask = nullptr;  // [B, n_q, ceil(n_q / 32)] bits over the last n_q keys
  std::int64_t alibi_sequence_stride = 0;    // elements from one sequence's slopes to the next; 0: all have the same
};

/// New keys and values, one for each query token: [B, Hkv, n_q, d] and [B, Hkv, n_q, dv], of q's type, packed where the queries
/// are. The call writes them to K and V, which must be writable then, and attends to them. Lengths count them: new token i is
/// token n_kv - n_q + i of its sequence, so lengths must be given (kv_lengths, cu_kv_tokens or page_indptr). Left out, of cache
/// and attention, is a token whose page lies outside the pool; nothing is appended to a sequence whose lengths had to be clamped.
/// With fp8 K/V it is stored as value / scale, rounded to nearest, at most the largest number. Pages of new tokens must not be
/// shared; on the CPU another sequence may read them.
struct Append {
  TensorView k{};  // null data: nothing to append
  TensorView v{};
  // Rotary embedding of q and the new keys, before anything else; a token's position is its row of the tables.
  const float* rotary_cos = nullptr;  // [kv_capacity, rotary_dim / 2]
  const float* rotary_sin = nullptr;
  std::int32_t rotary_dim = 0;      // 0: no rotary
  bool rotary_interleaved = false;  // pairs (0,1),(2,3).. instead of halves
  bool rotary_absolute = false;     // positions count from token 0, padding or not, instead of from the first valid token
  // Tokens that the cache holds before the call, for callers that have those. kv_lengths, which may hold anything then and must be
  // writable, is made cached_lengths[b] and the sequence's query tokens, where the call reads lengths.
  const std::int32_t* cached_lengths = nullptr;  // [B], or null: kv_lengths is given
};

/// What a call computes: sizes, tensors, lengths and the rules of scores. Every field has a default that asks for nothing; what must be
/// set are the sizes, the five views that are wanted and kv_capacity.
struct Problem {
  // Sizes.
  std::int64_t batch = 0;      // B, up to 2^31 - 1
  std::int32_t q_heads = 0;    // Hq, a multiple of kv_heads
  std::int32_t kv_heads = 0;   // Hkv
  std::int32_t head_dim = 0;   // d, 1 to kMaxHeadDim
  std::int32_t value_dim = 0;  // dv, 1 to kMaxHeadDim; 0 means head_dim

  // Tensors. q [B, Hq, n_q, d], k [B, Hkv, n_kv, d], v [B, Hkv, n_kv, dv], o [B, Hq, n_q, dv], lse [B, Hq, n_q].
  TensorView q{};
  TensorView k{};
  TensorView v{};
  OutputView o{};
  LseView lse{};

  // Query tokens: q_tokens of each sequence; with cu_q_tokens sequence b owns [cu[b], cu[b+1]) of total_q_tokens.
  std::int32_t q_tokens = 1;                  // n_q; with cu_q_tokens: the longest, an upper bound
  const std::int32_t* cu_q_tokens = nullptr;  // [B + 1], or null
  std::int64_t total_q_tokens = 0;            // tokens q, o and lse hold; with cu_q_tokens only

  // Key/value tokens: sequence b sees [kv_left_pad[b], length of b); a missing array means 0 and kv_capacity.
  // With a block table kv_lengths must be given.
  std::int32_t kv_capacity = 0;                // tokens a sequence may have: memory exists for them; 0: k and v are null
  const std::int32_t* kv_lengths = nullptr;    // [B], or null: clamped to [0, capacity], sticky code if it had to be
  const std::int32_t* kv_left_pad = nullptr;   // [B], or null: first token that counts
  const std::int32_t* cu_kv_tokens = nullptr;  // [B + 1], or null: ragged K/V, tokens packed end to end
  std::int64_t total_kv_tokens = 0;            // tokens k and v hold; with cu_kv_tokens only
  PagedKv pages{};

  Scores scores{};
  Append append{};

  // fp8 K/V only: value = stored x scale; null: 1.
  const float* k_scales = nullptr;  // [1] or [Hkv]
  const float* v_scales = nullptr;  // [1] or [Hkv]
  bool scales_per_head = false;
};

}  // namespace lean

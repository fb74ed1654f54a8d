// Attention of S queries over P past and L new tokens of each sequence, as both ONNX's Attention and com.microsoft's
// MultiHeadAttention ask it: the two parts become one cache first, and query i stands at position P + i, or counts back from
// the last of the valid tokens where their number is given.
#pragma once

#include <cstdint>

#include "cache.hpp"
#include "ort.hpp"

namespace lean::ort {

/// Added to the scores, or what a query may see. Shape: broadcast to [B, Hq, S, keys]; keys past its own last extent are hidden.
struct Mask {
  const char* name = nullptr;  // of the input, for messages
  const void* data = nullptr;  // null: none
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::int64_t keys = 0;
  Strides strides{};  // (sequence, head, query, key)
};

/// Throws Error where the shape cannot be broadcast.
[[nodiscard]] Mask broadcast_mask(const Tensor& tensor, const char* name, std::int64_t batch, std::int64_t heads,
                                  std::int64_t queries);

struct Attend {
  std::int64_t batch = 0;
  std::int64_t q_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t queries = 0;      // S
  std::int64_t past_tokens = 0;  // P
  std::int64_t new_tokens = 0;   // L

  TensorView q{};
  TensorView k{};
  TensorView v{};
  OutputView o{};
  TensorView past_k{};  // null: none
  TensorView past_v{};
  void* present_k = nullptr;  // [B, Hkv, P + L, d], null: nobody reads it
  void* present_v = nullptr;

  const std::int32_t* valid = nullptr;  // [B], tokens of each sequence that are there, where the node runs; null: P + L
  Mask mask{};
  float scale = 0.0F;
  float softcap = 0.0F;
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
};

void attend(Run& run, const Attend& call);

}  // namespace lean::ort

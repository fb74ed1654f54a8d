// TokenRows: K or V of one LeanTile as kernels read it: evenly spaced rows, or a table of where each row lies (pages, new
// tokens, tokens that nobody sees).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lean::cpu {

/// `tokens` rows of `dims` contiguous elements.
struct TokenRows {
  const void* data = nullptr;
  std::int64_t token_stride_bytes = 0;
  std::int32_t tokens = 0;
  std::int32_t dims = 0;
  const std::byte* const* table = nullptr;  // [tokens], in place of data and stride

  [[nodiscard]] const std::byte* row(std::int32_t token) const noexcept {
    return table != nullptr ? table[token] : static_cast<const std::byte*>(data) + token * token_stride_bytes;
  }
  /// row() of kCount tokens from `token` on, all of which there are, with one question for all of where they lie. A core looks a fixed
  /// number of instructions ahead, and how many late lines it meets there is what bounds a stream: each row has to cost few.
  template <int kCount>
  [[gnu::always_inline]] void find(std::int32_t token, const std::byte** out) const noexcept {
    if (table != nullptr) {
      for (int i = 0; i < kCount; ++i) out[i] = table[token + i];
      return;
    }
    out[0] = row(token);
    for (int i = 1; i < kCount; ++i) out[i] = out[i - 1] + token_stride_bytes;
  }
};

}  // namespace lean::cpu

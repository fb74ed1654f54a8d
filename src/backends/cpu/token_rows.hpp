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
};

}  // namespace lean::cpu

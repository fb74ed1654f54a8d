// PageSet: which pages of a pool a call does something with. For the host, which looks at tables before a call or at its beginning.
#pragma once

#include <array>
#include <cstdint>

namespace lean {

/// A set of page ids in 32 KB of the stack: nothing is allocated, and a larger pool is gone through piece by piece.
class PageSet {
 public:
  static constexpr std::int64_t kPages = std::int64_t{1} << 18;

  /// Whether `page` of [0, kPages) is there.
  [[nodiscard]] bool has(std::int64_t page) const noexcept { return (words_[word_of(page)] & bit_of(page)) != 0; }
  /// Whether `page` of [0, kPages) had been added before.
  [[nodiscard]] bool add(std::int64_t page) noexcept {
    const bool had = has(page);
    words_[word_of(page)] |= bit_of(page);
    return had;
  }

 private:
  [[nodiscard]] static constexpr std::size_t word_of(std::int64_t page) noexcept { return static_cast<std::size_t>(page / 64); }
  [[nodiscard]] static constexpr std::uint64_t bit_of(std::int64_t page) noexcept { return std::uint64_t{1} << (page % 64); }

  std::array<std::uint64_t, kPages / 64> words_{};
};

}  // namespace lean

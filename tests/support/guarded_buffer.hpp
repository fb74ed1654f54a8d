// GuardedBuffer: memory that notices what should not happen to it. Every buffer a test hands to the library is one.
//   kCanary: canary bytes (NaN in fp32, fp16 and bf16) on both sides, checked by intact(); aligned as asked for.
//   kPage:   ends exactly where an inaccessible page begins, so that one byte read or written past the end is a fault;
//            bytes before the start are canaries. Its alignment is whatever its size leaves.
// A GPU faults there too: only the pages in front are registered with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "support/target.hpp"

namespace lean::support {

enum class Guard { kCanary, kPage };

/// 0xFFFF is a NaN as fp16 and bf16, 0xFFFFFFFF one as fp32: also the pattern of poisoned outputs.
inline constexpr std::byte kPoison{0xFF};

class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  /// `offset` bytes past an address aligned to 256 (kCanary only). Filled with kPoison.
  explicit GuardedBuffer(std::size_t bytes, Guard guard = Guard::kCanary, std::size_t offset = 0);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size_bytes() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> bytes() const { return {data_, bytes_}; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  void fill(std::byte value) const;
  /// Nothing was written beside the buffer.
  [[nodiscard]] bool intact() const;
  /// Changes with any byte of the contents (FNV-1a, 64 bits).
  [[nodiscard]] std::uint64_t checksum() const;

 private:
  [[nodiscard]] std::span<std::byte> before() const;
  [[nodiscard]] std::span<std::byte> after() const;

  Pages pages_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace lean::support

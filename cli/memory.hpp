// Buffer: uninitialised memory for tensors and workspaces, in huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lean::cli {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes);  // throws std::bad_alloc

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t bytes_ = 0;
};

/// Bytes this process may still take without swapping; the largest number there is where the system does not say.
[[nodiscard]] std::int64_t available_memory_bytes();

/// "K/V needs 91.6 GB, 19.8 GB of memory are available": throws BadArgument unless `bytes` fit.
void require_memory(std::int64_t bytes, const char* remedy);

}  // namespace lean::cli

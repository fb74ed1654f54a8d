// Buffer: uninitialised memory for tensors and workspaces, on the host in huge pages where the system grants them, or on the
// GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lean/options.hpp"

namespace lean::cli {

enum class Place : std::int32_t { kHost, kDevice };

/// Where a backend wants its tensors.
[[nodiscard]] constexpr Place place_of(Backend backend) noexcept {
  return backend == Backend::kCuda ? Place::kDevice : Place::kHost;
}

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes, Place place = Place::kHost);  // throws std::bad_alloc

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] Place place() const { return data_.get_deleter().place; }

  void set_bytes(unsigned char value) const;

 private:
  struct Free {
    Place place;
    void operator()(std::byte* p) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t bytes_ = 0;
};

/// Copies all of `from`, between any two places, and waits.
void copy_bytes(const Buffer& to, const Buffer& from);

/// Bytes this process may still take there, without swapping; the largest number there is where the system does not say.
[[nodiscard]] std::int64_t available_memory_bytes(Place place = Place::kHost);

/// "the tensors need 91.6 GB, 19.8 GB of memory are available": throws BadArgument unless `bytes` fit.
void require_memory(Place place, std::int64_t bytes, const char* remedy);

}  // namespace lean::cli

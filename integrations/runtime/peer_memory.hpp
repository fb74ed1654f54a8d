// The memory of an exchange between processes (lean/exchange.hpp), as long as an object lives: one's own, which others may open, and
// theirs, opened here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lean/lean.hpp"

namespace lean::runtime {

/// One rank's side of an exchange whose ranks are processes of one host, a GPU each. Every rank makes one, tells the others its
/// handle by whatever connects them, and opens theirs; exchange() is complete then. Memory is given back with it: not while
/// another rank may still be in a call.
class PeerMemory {
 public:
  struct Asked {
    std::int32_t device_index = 0;
    std::int32_t rank = 0;
    std::int32_t ranks = 1;
    std::size_t bytes = 0;  // exchange_bytes(), or more
    std::int64_t limit_ns = Exchange{}.limit_ns;
  };

  /// Takes zeroed memory of the device. Throws device::Error, or device::Absent without the CUDA backend.
  explicit PeerMemory(const Asked& asked);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  [[nodiscard]] const ExchangeHandle& handle() const noexcept { return handle_; }
  /// Another rank's memory. Throws device::Error: its device cannot be reached from this one, or it is of this process.
  void open(std::int32_t rank, const ExchangeHandle& handle);
  [[nodiscard]] const Exchange& exchange() const noexcept { return exchange_; }
  [[nodiscard]] std::int32_t device_index() const noexcept { return exchange_.device; }
  /// Zeroes one's own memory and the fault word: by all ranks while none is in a call. Throws device::Error.
  void clear();

 private:
  Exchange exchange_;
  ExchangeHandle handle_;
};

}  // namespace lean::runtime

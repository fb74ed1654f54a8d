// The memory of an exchange between processes (lean/exchange.hpp): one's own, which others may open, and theirs, opened here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "lean/lean.hpp"

namespace lean::runtime {

/// One rank's side of an exchange whose ranks are processes of one host, a GPU each. Every rank makes one, tells the others its
/// handle by whatever connects them, and opens theirs; exchange() is complete then. Memory is given back with it: not while
/// another rank may still be in a call.
class PeerMemory {
 public:
  using Handle = std::array<std::byte, 64>;  // a cudaIpcMemHandle_t

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

  [[nodiscard]] const Handle& handle() const noexcept;
  /// Another rank's memory. Throws device::Error: its device cannot be reached from this one, or it is of this process.
  void open(std::int32_t rank, const Handle& handle);
  [[nodiscard]] const Exchange& exchange() const noexcept;
  [[nodiscard]] std::int32_t device_index() const noexcept;
  /// Zeroes one's own memory and the fault word: by all ranks while none is in a call. Throws device::Error.
  void clear();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lean::runtime

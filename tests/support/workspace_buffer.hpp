// WorkspaceBuffer: memory for a workspace, on the target, with canaries on both sides. On the CPU it is a GuardedBuffer; on
// a GPU device memory, looked at by copying it back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/guarded_buffer.hpp"

namespace lean::support {

class WorkspaceBuffer {
 public:
  /// Filled with kPoison.
  explicit WorkspaceBuffer(std::size_t bytes);
  ~WorkspaceBuffer();
  WorkspaceBuffer(const WorkspaceBuffer&) = delete;
  WorkspaceBuffer& operator=(const WorkspaceBuffer&) = delete;

  [[nodiscard]] std::byte* data() const;
  [[nodiscard]] std::size_t size_bytes() const { return bytes_; }
  /// The same 32 bits again and again.
  void fill(std::uint32_t pattern) const;
  /// Nothing was written beside the buffer.
  [[nodiscard]] bool intact() const;
  [[nodiscard]] std::vector<std::byte> contents() const;

 private:
  std::size_t bytes_;
  GuardedBuffer host_;           // on the CPU
  std::byte* device_ = nullptr;  // on a GPU: [canary | buffer | canary]
};

}  // namespace lean::support

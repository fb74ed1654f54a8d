#include "support/workspace_buffer.hpp"

#include <algorithm>
#include <cstring>

#include "support/target.hpp"

namespace lean::support {
namespace {
constexpr std::size_t kCanaryBytes = 256;  // keeps the buffer aligned as a workspace must be
}  // namespace

WorkspaceBuffer::WorkspaceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (on_cuda()) {
    device_ = allocate_on_device(bytes + 2 * kCanaryBytes);
    copy_to_device(device_, std::vector<std::byte>(bytes + 2 * kCanaryBytes, kPoison));
  } else {
    host_ = GuardedBuffer(bytes);
  }
}

WorkspaceBuffer::~WorkspaceBuffer() {
  if (device_ != nullptr) free_on_device(device_);
}

std::byte* WorkspaceBuffer::data() const { return device_ != nullptr ? device_ + kCanaryBytes : host_.data(); }

void WorkspaceBuffer::fill(std::uint32_t pattern) const {
  std::vector<std::byte> filled(bytes_);
  for (std::size_t i = 0; i < bytes_; i += sizeof(pattern)) {
    std::memcpy(filled.data() + i, &pattern, std::min(sizeof(pattern), bytes_ - i));
  }
  if (device_ != nullptr) return copy_to_device(data(), filled);
  std::copy(filled.begin(), filled.end(), host_.data());
}

bool WorkspaceBuffer::intact() const {
  if (device_ == nullptr) return host_.intact();
  std::vector<std::byte> canaries(2 * kCanaryBytes);
  const std::span<std::byte> both(canaries);
  copy_from_device(both.first(kCanaryBytes), device_);
  copy_from_device(both.last(kCanaryBytes), data() + bytes_);
  return std::all_of(canaries.begin(), canaries.end(), [](std::byte b) { return b == kPoison; });
}

std::vector<std::byte> WorkspaceBuffer::contents() const {
  std::vector<std::byte> bytes(bytes_);
  if (device_ != nullptr) {
    copy_from_device(bytes, data());
  } else {
    std::copy_n(host_.data(), bytes_, bytes.begin());
  }
  return bytes;
}

}  // namespace lean::support

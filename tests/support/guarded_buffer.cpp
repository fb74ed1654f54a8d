#include "support/guarded_buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace lean::support {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kCanaryBytes = 256;

std::size_t round_up_to(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, Guard guard, std::size_t offset) : bytes_(bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  protected_bytes_ = guard == Guard::kPage ? page : 0;
  mapping_bytes_ = round_up_to(kAlignment + offset + bytes + (guard == Guard::kPage ? 0 : kCanaryBytes), page);
  void* mapping = mmap(nullptr, mapping_bytes_ + protected_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  if (guard == Guard::kPage && mprotect(mapping_ + mapping_bytes_, protected_bytes_, PROT_NONE) != 0) throw std::bad_alloc();
  data_ = guard == Guard::kPage ? mapping_ + mapping_bytes_ - bytes : mapping_ + kAlignment + offset;
  std::memset(mapping_, static_cast<int>(kPoison), mapping_bytes_);
}

GuardedBuffer::~GuardedBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_ + protected_bytes_);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept { *this = std::move(other); }

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(protected_bytes_, other.protected_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void GuardedBuffer::fill(std::byte value) const {
  if (bytes_ > 0) std::memset(data_, static_cast<int>(value), bytes_);
}

std::span<std::byte> GuardedBuffer::before() const {
  const auto distance = static_cast<std::size_t>(data_ - mapping_);
  const std::size_t checked = std::min(distance, kCanaryBytes);
  return {data_ - checked, checked};
}

std::span<std::byte> GuardedBuffer::after() const {
  const auto distance = static_cast<std::size_t>(mapping_ + mapping_bytes_ - (data_ + bytes_));
  return {data_ + bytes_, std::min(distance, kCanaryBytes)};
}

bool GuardedBuffer::intact() const {
  if (mapping_ == nullptr) return true;
  const auto untouched = [](std::span<std::byte> canary) {
    return std::all_of(canary.begin(), canary.end(), [](std::byte b) { return b == kPoison; });
  };
  return untouched(before()) && untouched(after());
}

std::uint64_t GuardedBuffer::checksum() const {
  std::uint64_t hash = 0xCBF29CE484222325U;
  const auto add = [&hash](std::uint64_t word) { hash = (hash ^ word) * 0x100000001B3U; };
  std::size_t i = 0;
  for (; i + sizeof(std::uint64_t) <= bytes_; i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, data_ + i, sizeof(word));
    add(word);
  }
  for (; i < bytes_; ++i) add(static_cast<std::uint64_t>(data_[i]));
  return hash;
}

}  // namespace lean::support

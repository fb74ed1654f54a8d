#include "support/guarded_buffer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace lean::support {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kCanaryBytes = 256;

std::size_t round_up_to(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, Guard guard, std::size_t offset) : bytes_(bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const bool closed = guard == Guard::kPage;
  pages_ = take_pages(round_up_to(kAlignment + offset + bytes + (closed ? 0 : kCanaryBytes), page), closed ? page : 0);
  data_ = closed ? pages_.begin + pages_.bytes - bytes : pages_.begin + kAlignment + offset;
  std::memset(pages_.begin, static_cast<int>(kPoison), pages_.bytes);
}

GuardedBuffer::~GuardedBuffer() {
  if (pages_.begin != nullptr) give_pages(pages_);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept { *this = std::move(other); }

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(pages_, other.pages_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void GuardedBuffer::fill(std::byte value) const {
  if (bytes_ > 0) std::memset(data_, static_cast<int>(value), bytes_);
}

std::span<std::byte> GuardedBuffer::before() const {
  const auto distance = static_cast<std::size_t>(data_ - pages_.begin);
  const std::size_t checked = std::min(distance, kCanaryBytes);
  return {data_ - checked, checked};
}

std::span<std::byte> GuardedBuffer::after() const {
  const auto distance = static_cast<std::size_t>(pages_.begin + pages_.bytes - (data_ + bytes_));
  return {data_ + bytes_, std::min(distance, kCanaryBytes)};
}

bool GuardedBuffer::intact() const {
  if (pages_.begin == nullptr) return true;
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

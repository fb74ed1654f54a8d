#include "cli/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"
#include "cli/gpu.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lean::cli {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
constexpr std::int64_t kSmallAlignmentBytes = 4096;

std::int64_t meminfo_available() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  for (std::int64_t kib = 0; file >> key >> kib; file.ignore(kNoLimit, '\n')) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return kNoLimit;
}

std::int64_t cgroup_limit() {
  std::int64_t bytes = 0;
  std::ifstream file("/sys/fs/cgroup/memory.max");  // "max" where there is no limit
  return file >> bytes ? bytes : kNoLimit;
}

std::byte* allocate_on_host(std::int64_t bytes) {
  const std::int64_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : kSmallAlignmentBytes;
  const auto padded = static_cast<std::size_t>(round_up(std::max<std::int64_t>(bytes, 1), alignment));
  auto* const data = static_cast<std::byte*>(std::aligned_alloc(static_cast<std::size_t>(alignment), padded));
  if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (bytes >= kHugePageBytes) (void)madvise(data, padded, MADV_HUGEPAGE);  // only a wish
#endif
  return data;
}

}  // namespace

Buffer::Buffer(std::int64_t bytes, Place place)
    : data_(place == Place::kDevice ? gpu::allocate(bytes) : allocate_on_host(bytes), Free{place}), bytes_(bytes) {}

void Buffer::Free::operator()(std::byte* p) const noexcept {
  if (place == Place::kDevice) {
    gpu::release(p);
  } else {
    std::free(p);
  }
}

void Buffer::set_bytes(unsigned char value) const {
  if (place() == Place::kDevice) {
    gpu::set_bytes(data(), value, bytes_);
  } else {
    std::memset(data(), value, static_cast<std::size_t>(bytes_));
  }
}

void copy_bytes(const Buffer& to, const Buffer& from) {
  if (to.place() == Place::kHost && from.place() == Place::kHost) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.bytes()));
  } else {
    gpu::copy(to.data(), from.data(), from.bytes());
  }
}

std::int64_t available_memory_bytes(Place place) {
  return place == Place::kDevice ? gpu::free_bytes() : std::min(meminfo_available(), cgroup_limit());
}

void require_memory(Place place, std::int64_t bytes, const char* remedy) {
  const std::int64_t available = available_memory_bytes(place);
  if (bytes <= available) return;
  throw BadArgument(fmt::format("the tensors need {:.1f} GB, {:.1f} GB of {}memory are available: {}",
                                static_cast<double>(bytes) / 1e9, static_cast<double>(available) / 1e9,
                                place == Place::kDevice ? "GPU " : "", remedy));
}

}  // namespace lean::cli

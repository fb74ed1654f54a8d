#include "cli/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"

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

}  // namespace

Buffer::Buffer(std::int64_t bytes) : bytes_(bytes) {
  const std::int64_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : kSmallAlignmentBytes;
  const auto padded = static_cast<std::size_t>(round_up(std::max<std::int64_t>(bytes, 1), alignment));
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(static_cast<std::size_t>(alignment), padded)));
  if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (bytes >= kHugePageBytes) (void)madvise(data_.get(), padded, MADV_HUGEPAGE);  // only a wish
#endif
}

void Buffer::Free::operator()(std::byte* p) const noexcept { std::free(p); }

std::int64_t available_memory_bytes() { return std::min(meminfo_available(), cgroup_limit()); }

void require_memory(std::int64_t bytes, const char* remedy) {
  const std::int64_t available = available_memory_bytes();
  if (bytes <= available) return;
  throw BadArgument(fmt::format("the tensors need {:.1f} GB, {:.1f} GB of memory are available: {}",
                                static_cast<double>(bytes) / 1e9, static_cast<double>(available) / 1e9, remedy));
}

}  // namespace lean::cli

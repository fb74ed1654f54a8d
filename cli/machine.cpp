#include "cli/machine.hpp"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <set>
#include <tuple>

#include "cli/threads.hpp"
#include "lean/lean.hpp"

#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif

#ifndef LEAN_EXECUTOR_NAME
#define LEAN_EXECUTOR_NAME "unknown"
#endif

namespace lean::cli {
namespace {

constexpr std::int64_t kAssumedCacheBytes = std::int64_t{32} << 20;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The value of the first line "key : value" of /proc/cpuinfo.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (line.compare(0, key.size(), key) == 0 && colon != std::string::npos && colon + 2 <= line.size())
      return line.substr(colon + 2);
  }
  return {};
}

std::string cpu_model() {
  for (const char* key : {"model name", "Model", "Hardware", "CPU part"}) {
    if (const std::string value = cpuinfo(key); !value.empty()) return value;
  }
  return "unknown CPU";
}

/// "32768K" -> bytes.
std::int64_t parse_cache_bytes(const std::string& text) {
  std::int64_t value = 0;
  for (const char c : text) {
    if (c >= '0' && c <= '9') value = value * 10 + (c - '0');
    if (c == 'K') return value << 10;
    if (c == 'M') return value << 20;
  }
  return value;
}

std::vector<std::int32_t> usable_cpus() {
  std::vector<std::int32_t> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (std::int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
    }
  }
#endif
  return cpus;
}

std::vector<CacheLevel> caches_of(const std::vector<std::int32_t>& cpus) {
  std::vector<CacheLevel> levels;
  std::set<std::tuple<int, std::string, std::string>> seen;  // level, type, the processors that share it
  for (const std::int32_t cpu : cpus) {
    for (int entry = 0;; ++entry) {
      const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(entry) + "/";
      const std::string level_text = first_line(folder + "level");
      if (level_text.empty()) break;
      const int level = level_text[0] - '0';
      const std::string type = first_line(folder + "type");
      if (!seen.emplace(level, type, first_line(folder + "shared_cpu_list")).second) continue;
      const auto same = [&](const CacheLevel& c) { return c.level == level && c.type == type; };
      auto found = std::find_if(levels.begin(), levels.end(), same);
      if (found == levels.end()) {
        levels.push_back({.level = level, .type = type, .bytes = parse_cache_bytes(first_line(folder + "size"))});
        found = levels.end() - 1;
      }
      ++found->instances;
    }
  }
  return levels;
}

}  // namespace

std::int64_t Machine::last_level_cache_bytes() const {
  const CacheLevel* last = nullptr;
  for (const CacheLevel& cache : caches) {
    if (last == nullptr || cache.level > last->level) last = &cache;
  }
  return last != nullptr && last->bytes > 0 ? last->bytes * last->instances : kAssumedCacheBytes;
}

Machine inspect_machine() {
  const std::vector<std::int32_t> cpus = usable_cpus();
  const auto logical = static_cast<std::int32_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  return {.cpu_model = cpu_model(),
          .logical_cpus = logical,
          .usable_cpus = cpus.empty() ? logical : static_cast<std::int32_t>(cpus.size()),
          .caches = caches_of(cpus),
          .executor = LEAN_EXECUTOR_NAME,
          .threads = thread_count()};
}

std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa :
       {CpuIsa::kScalar, CpuIsa::kNative128, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16}) {
    if (cpu_isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

}  // namespace lean::cli

// Words of 16 bytes that GPUs of one host store to each other's memory and load from their own, whole; and the clock that
// bounds waits for them. Source: PTX ISA, "Memory Consistency Model": strong relaxed operations of system scope; a .b128 is one
// scalar, so it is stored and loaded by a single access, where a vector of two or four is several.
#pragma once

#include <cstdint>

namespace lean::cuda::ptx {

struct alignas(16) SystemWord {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

[[nodiscard]] __device__ __forceinline__ SystemWord load_relaxed_system(const SystemWord* from) {
  SystemWord word;
  asm volatile(
      "{ .reg .b128 word;\n"
      "ld.relaxed.sys.global.b128 word, [%2];\n"
      "mov.b128 {%0, %1}, word; }"
      : "=l"(word.low), "=l"(word.high)
      : "l"(from)
      : "memory");
  return word;
}

__device__ __forceinline__ void store_relaxed_system(SystemWord* to, const SystemWord& word) {
  asm volatile(
      "{ .reg .b128 word;\n"
      "mov.b128 word, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], word; }" ::"l"(to),
      "l"(word.low), "l"(word.high)
      : "memory");
}

/// Nanoseconds of a clock that all multiprocessors share.
[[nodiscard]] __device__ __forceinline__ std::int64_t global_time_ns() {
  std::int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace lean::cuda::ptx

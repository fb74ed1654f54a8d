// Kernels of the tests' own: those that are in the way, and those that look at a lot of memory.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "gpu/device_memory.hpp"

namespace lean::gpu {

/// Holds `ctas` multiprocessors, all of their shared memory, until told to stop; never longer than `limit`. Each CTA counts
/// itself in when it starts.
void occupy(const Stream& stream, std::int32_t ctas, const Signals& signals, std::chrono::milliseconds limit);

/// Reads and writes `memory` again and again, a few CTAs on every multiprocessor, until told to stop.
void hog_bandwidth(const Stream& stream, const DeviceBuffer& memory, const Signals& signals, std::chrono::milliseconds limit);

/// to[i] = from[i], on the device.
void copy_ints(const Stream& stream, std::int32_t* to, const std::int32_t* from, std::int32_t count);

struct IntCopy {
  std::int32_t* to;
  const std::int32_t* from;
  std::int32_t count;
};

/// Lets dependent kernels start, then waits for `delay`, then makes both copies.
void copy_ints_late(const Stream& stream, IntCopy first, IntCopy second, std::chrono::microseconds delay);

/// How many of the buffer's 32-bit words are not `pattern`. Waits.
[[nodiscard]] std::uint64_t count_other_words(const DeviceBuffer& memory, std::uint32_t pattern);

enum class Fp8Conversion : std::int32_t { kE5M2, kE4M3, kE4M3ByProduct };

/// The backend's conversion of all pairs of fp8, [65536] words of two fp16, the pair in the lower or the upper half of a word.
void convert_fp8_pairs(std::uint32_t* halves, Fp8Conversion conversion, bool upper);

/// Leaves the shared memory of all multiprocessors full of `value`: what the next kernel finds where it has written nothing.
void fill_shared(const Stream& stream, std::byte value);

/// A kernel that ends the context: every later call gives an error.
void trap(const Stream& stream);

}  // namespace lean::gpu

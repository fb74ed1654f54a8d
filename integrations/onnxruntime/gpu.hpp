// What operators need done in a GPU's memory around a call of the library: counts in another form, masks as bytes, 16-bit
// numbers as fp32, rows of a cache moved. Each function enqueues one kernel or copy on a stream and reads nothing on the host.
// gpu_cuda.cu in a build with the CUDA backend, gpu_absent.cpp in others, which no run reaches. Throws runtime::device::Error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache.hpp"
#include "rule_mask.hpp"
#include "stream.hpp"

namespace lean::ort::gpu {

/// Counts of a batch as the operators give them: values[b] + plus.
struct GivenCounts {
  const void* values = nullptr;
  bool int64 = false;  // else int32
  std::int32_t plus = 0;
};

/// to[b] for b in [0, batch), as the library wants lengths; what int32 does not hold becomes the nearest that it does.
void count(const Stream& stream, const GivenCounts& given, std::int64_t batch, std::int32_t* to);

/// A batch [B, S] of rows, the first of each sequence tokens and the rest padding, as 2 B sequences packed end to end: those with
/// tokens, and after each one with the padding, which has no keys.
struct PaddedRows {
  std::int64_t batch = 0;
  std::int32_t rows = 0;                 // S
  const std::int32_t* totals = nullptr;  // [B], tokens of each sequence after the call
  const std::int32_t* tokens = nullptr;  // [B], rows that are tokens; null: as many as there are of S and the total
  std::int32_t* lengths = nullptr;       // [2 B]: written
  std::int32_t* cu_q_tokens = nullptr;   // [2 B + 1]: written
};
void split_padding(const Stream& stream, const PaddedRows& given);

/// seen[r][key]: given[r * keys + key] is above 0, or with `lengths` that key < given[r].
struct SeenKeys {
  const std::int32_t* given = nullptr;
  bool lengths = false;
  std::int64_t rows = 0;
  std::int64_t keys = 0;
};
void mark_seen(const Stream& stream, const SeenKeys& keys, bool* seen);

/// float16 or bfloat16 as fp32.
void to_floats(const Stream& stream, const void* from, DType dtype, std::int64_t count, float* to);

/// Copies `bytes` within the device.
void copy(const Stream& stream, const void* from, void* to, std::size_t bytes);

/// As that of cache.hpp, kMovesAtOnce by one kernel; counts lie on the device.
void move_tokens(const Stream& stream, std::span<const Move> moves);

/// values[row * keys + key] = mask_value(rules, row, key), of arrays on the device.
void fill_mask(const Stream& stream, const RuleMask& rules, float* values);

/// Device memory with these numbers, there when it returns; and numbers of the model read back. Not for runs: both wait.
[[nodiscard]] std::shared_ptr<const float> keep(const std::vector<float>& values);
[[nodiscard]] std::vector<std::byte> read_back(const void* memory, std::size_t bytes);

}  // namespace lean::ort::gpu

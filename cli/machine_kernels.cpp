// Compiled once per instruction set by foreach_target; the part under HWY_ONCE once.
#include "cli/machine_kernels.hpp"

#include <array>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cli/machine_kernels.cpp"
#include "hwy/foreach_target.h"
//
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace lean::cli::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using Words = hn::ScalableTag<std::uint64_t>;
using Floats = hn::ScalableTag<float>;

constexpr std::int64_t kVectorBytes = HWY_LANES(std::uint64_t) * std::int64_t{8};
constexpr std::int64_t kStepBytes = kVectorBytes * 4 > 256 ? kVectorBytes * 4 : 256;  // of one stream: whole cache lines
constexpr std::int64_t kLineBytes = 64;

std::uint64_t read_words(const std::byte* data, std::int64_t bytes) noexcept {
  std::uint64_t folded = 0;
  for (std::int64_t at = 0; at < bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, sizeof(word));
    folded ^= word;
  }
  return folded;
}

/// The data as kStreams equal runs, read side by side; each prefetched kAheadBytes ahead if that is not 0.
template <int kStreams, int kAheadBytes>
std::uint64_t read_streams(const std::byte* data, std::int64_t bytes) noexcept {
  const Words words;
  const std::int64_t run_bytes = bytes / kStreams / kStepBytes * kStepBytes;
  auto a = hn::Zero(words);
  auto b = a;
  auto c = a;
  auto d = a;
  for (std::int64_t at = 0; at < run_bytes; at += kStepBytes) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const std::byte* step = data + stream * run_bytes + at;
      if (kAheadBytes > 0) {
        for (std::int64_t line = 0; line < kStepBytes; line += kLineBytes) hwy::Prefetch(step + kAheadBytes + line);
      }
      for (std::int64_t i = 0; i < kStepBytes; i += 4 * kVectorBytes) {
        const auto* p = reinterpret_cast<const std::uint64_t*>(step + i);
        constexpr std::size_t kLanes = HWY_LANES(std::uint64_t);
        a = hn::Xor(a, hn::LoadU(words, p));
        b = hn::Xor(b, hn::LoadU(words, p + kLanes));
        c = hn::Xor(c, hn::LoadU(words, p + 2 * kLanes));
        d = hn::Xor(d, hn::LoadU(words, p + 3 * kLanes));
      }
    }
  }
  HWY_ALIGN std::uint64_t lanes[HWY_LANES(std::uint64_t)];
  hn::Store(hn::Xor(hn::Xor(a, b), hn::Xor(c, d)), words, lanes);
  std::uint64_t folded = read_words(data + kStreams * run_bytes, bytes - kStreams * run_bytes);
  for (const std::uint64_t lane : lanes) folded ^= lane;
  return folded;
}

/// 12 chains: more than latency x units of today's cores (5 x 2), and few enough for 16 registers.
std::int64_t multiply_add(std::int64_t steps, float* sink) noexcept {
  constexpr std::size_t kChains = 12;
  const Floats floats;
  const auto factor = hn::Set(floats, *sink);
  const auto term = hn::Set(floats, *sink * 0.5F);
  hn::Vec<Floats> chains[kChains];
  for (std::size_t i = 0; i < kChains; ++i) chains[i] = hn::Set(floats, static_cast<float>(i));
  for (std::int64_t step = 0; step < steps; ++step) {
    for (auto& chain : chains) chain = hn::MulAdd(chain, factor, term);
  }
  for (std::size_t i = 1; i < kChains; ++i) chains[0] = hn::Add(chains[0], chains[i]);
  *sink = hn::GetLane(chains[0]);
  return steps * static_cast<std::int64_t>(kChains * HWY_LANES(float));
}

struct Kernels {
  std::array<ReadKernel, 6> reads;
  ProductKernel product;
};

}  // namespace

const Kernels& kernels() {
  static const Kernels table{
      .reads = {ReadKernel{"1 stream", read_streams<1, 0>}, ReadKernel{"1 stream, prefetch", read_streams<1, 2048>},
                ReadKernel{"2 streams", read_streams<2, 0>}, ReadKernel{"2 streams, prefetch", read_streams<2, 2048>},
                ReadKernel{"4 streams", read_streams<4, 0>}, ReadKernel{"4 streams, prefetch", read_streams<4, 1024>}},
      .product = {multiply_add}};
  return table;
}

std::span<const ReadKernel> read_kernels_of_target() { return kernels().reads; }
ProductKernel product_kernel_of_target() { return kernels().product; }

}  // namespace lean::cli::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lean::cli {

HWY_EXPORT(read_kernels_of_target);
HWY_EXPORT(product_kernel_of_target);

std::span<const ReadKernel> read_kernels() { return HWY_DYNAMIC_DISPATCH(read_kernels_of_target)(); }
ProductKernel fp32_product_kernel() { return HWY_DYNAMIC_DISPATCH(product_kernel_of_target)(); }

}  // namespace lean::cli
#endif  // HWY_ONCE

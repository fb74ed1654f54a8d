// Counter-based random numbers: a value depends on its key alone, so any element of any tensor can be made in any
// order, on any machine, and a test that fails is repeated from its seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace lean::support {

/// splitmix64's finaliser (Steele, Lea, Flood 2014): every bit of the result depends on every bit of x.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

[[nodiscard]] constexpr std::uint64_t key_of(std::initializer_list<std::int64_t> parts) {
  std::uint64_t key = 0;
  for (const std::int64_t part : parts) key = mix(key ^ static_cast<std::uint64_t>(part));
  return key;
}

/// Uniform in [0, 1).
[[nodiscard]] constexpr double uniform(std::uint64_t key) { return static_cast<double>(mix(key) >> 11) * 0x1p-53; }

/// Uniform in [0, count).
[[nodiscard]] constexpr std::int64_t pick(std::uint64_t key, std::int64_t count) {
  return static_cast<std::int64_t>(mix(key) % static_cast<std::uint64_t>(count));
}

/// Independent values of N(0, 1), by Box and Muller, two at a time.
inline void fill_normal(std::uint64_t key, std::span<double> out) {
  for (std::size_t i = 0; i < out.size(); i += 2) {
    const std::uint64_t pair = mix(key + i);
    const auto u = static_cast<float>((pair >> 40) + 1) * 0x1p-24F;
    const auto angle = static_cast<float>(pair & 0xFFFFFFU) * (6.2831853F * 0x1p-24F);
    const float radius = std::sqrt(-2.0F * std::log(u));
    out[i] = static_cast<double>(radius * std::cos(angle));
    if (i + 1 < out.size()) out[i + 1] = static_cast<double>(radius * std::sin(angle));
  }
}

/// A stream of numbers for tests that draw one after the other.
class Stream {
 public:
  explicit Stream(std::uint64_t seed) : key_(mix(seed)) {}
  [[nodiscard]] std::uint64_t bits() { return key_ = mix(key_); }
  /// Uniform in [low, high].
  [[nodiscard]] std::int64_t between(std::int64_t low, std::int64_t high) { return low + pick(bits(), high - low + 1); }
  [[nodiscard]] bool chance(int percent) { return between(0, 99) < percent; }
  template <typename T>
  [[nodiscard]] T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::uint64_t key_;
};

}  // namespace lean::support

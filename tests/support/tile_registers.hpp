// AMX's tile registers in software, so that what multiplies on them is tested where no processor has any. Included ahead of the kernels'
// source: the intrinsics' names then mean what is here (Intel SDM, volume 2: LDTILECFG, TILELOADD, TDPBF16PS). Shapes that do not
// fit each other, which a processor answers with an exception, end the program. A denormal factor counts as 0, as there; sums are
// rounded once for each product and not as the processor rounds, so tests should use numbers whose sums are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backends/cpu/avx512_intrinsics.hpp"
#include "lean/float_types.hpp"

namespace lean::support {

class TileRegisters {
 public:
  static TileRegisters& of_thread() {
    static thread_local TileRegisters registers;
    return registers;
  }

  void load_config(const void* config) {
    std::uint8_t bytes[64];
    std::memcpy(bytes, config, sizeof bytes);
    need(bytes[0] == 1, "palette 1");
    for (int i = 0; i < kCount; ++i) {
      std::uint16_t row_bytes = 0;
      std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
      registers_[i] = {.rows = bytes[48 + i], .row_bytes = row_bytes};
      need(registers_[i].rows <= kRows && row_bytes <= kRowBytes, "at most 16 rows of 64 bytes");
    }
    configured_ = true;
  }
  void release() { configured_ = false; }

  void zero(int i) { std::memset(used(i).bytes, 0, sizeof registers_[i].bytes); }
  void load(int i, const void* from, std::ptrdiff_t stride) {
    zero(i);
    for (int r = 0; r < registers_[i].rows; ++r) {
      std::memcpy(registers_[i].bytes[r], static_cast<const std::byte*>(from) + r * stride, registers_[i].row_bytes);
    }
  }
  void store(int i, void* to, std::ptrdiff_t stride) {
    for (int r = 0; r < used(i).rows; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride, registers_[i].bytes[r], registers_[i].row_bytes);
    }
  }
  /// c[m][n] += a[m][2 k] b[k][2 n] + a[m][2 k + 1] b[k][2 n + 1], summed over k.
  void multiply(int to, int first, int second) {
    Register& c = used(to);
    const Register& a = used(first);
    const Register& b = used(second);
    need(to != first && to != second && first != second, "three registers");
    need(a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows, "shapes that fit");
    for (int m = 0; m < c.rows; ++m) {
      for (int n = 0; n < c.row_bytes / 4; ++n) {
        float sum = 0.0F;
        std::memcpy(&sum, c.bytes[m] + 4 * n, sizeof sum);
        for (int k = 0; k < b.rows; ++k) {
          for (int half = 0; half < 2; ++half) sum += bf16(a.bytes[m] + 4 * k + 2 * half) * bf16(b.bytes[k] + 4 * n + 2 * half);
        }
        std::memcpy(c.bytes[m] + 4 * n, &sum, sizeof sum);
      }
    }
  }

 private:
  static constexpr int kCount = 8;
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = 64;

  struct Register {
    int rows = 0;
    std::uint16_t row_bytes = 0;
    std::uint8_t bytes[kRows][kRowBytes] = {};
  };

  static void need(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "tile registers: expected %s\n", what);
    std::abort();
  }
  static float bf16(const std::uint8_t* from) {
    BFloat16 x;
    std::memcpy(&x.bits, from, sizeof x.bits);
    return (x.bits & 0x7F80U) == 0 ? 0.0F : to_float(x);
  }
  Register& used(int i) {
    need(configured_ && registers_[i].rows > 0, "a register that was configured");
    return registers_[i];
  }

  Register registers_[kCount];
  bool configured_ = false;
};

}  // namespace lean::support

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ::lean::support::TileRegisters::of_thread().load_config(config)
#define _tile_release() ::lean::support::TileRegisters::of_thread().release()
#define _tile_zero(i) ::lean::support::TileRegisters::of_thread().zero(i)
#define _tile_loadd(i, from, stride) ::lean::support::TileRegisters::of_thread().load(i, from, stride)
#define _tile_stored(i, to, stride) ::lean::support::TileRegisters::of_thread().store(i, to, stride)
#define _tile_dpbf16ps(to, first, second) ::lean::support::TileRegisters::of_thread().multiply(to, first, second)

// A square of words turned by AVX-512, for the kernels that multiply pairs of bf16: a word is a pair of dims or of tokens. Included
// where intrinsics are.
#pragma once

#if defined(__x86_64__)

#include "backends/cpu/avx512_intrinsics.hpp"
#include "backends/cpu/unroll.hpp"

namespace lean::cpu {

/// 16 rows of 16 words become 16 columns.
__attribute__((target("avx512f"))) inline void transpose_words(__m512i* rows) {
  __m512i a[16];
  LEAN_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i b[16];  // b[4 i + c]: word c of each 128 bits of rows 4 i to 4 i + 3
  LEAN_UNROLL for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  LEAN_UNROLL for (int c = 0; c < 4; ++c) {  // the 4 x 4 blocks of 128 bits that are left
    const __m512i low01 = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xDD);
    const __m512i low23 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xDD);
    rows[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    rows[c + 4] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    rows[c + 8] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
    rows[c + 12] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
  }
}

}  // namespace lean::cpu

#endif

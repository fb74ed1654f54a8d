// LEAN_UNROLL, before a loop of constant length: unrolled whole, early, so that arrays of vectors which it walks become
// registers. Left to itself GCC 12 unrolls such loops after it has laid the arrays out in memory, and every sum goes through the
// stack.
#pragma once

#ifdef __clang__
#define LEAN_UNROLL _Pragma("unroll")
#else
#define LEAN_UNROLL _Pragma("GCC unroll 32")
#endif

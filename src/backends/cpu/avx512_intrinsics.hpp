// <immintrin.h> without what GCC says of it: ahead of its first inclusion, for the rest of the file. Only where __x86_64__ is defined.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"        // GCC PR 105593: its own _mm512_undefined_ps()
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the same report
#endif
#include <immintrin.h>

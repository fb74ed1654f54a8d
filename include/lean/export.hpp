// LEAN_API marks what liblean_attention.so exports; everything else in it is hidden.
// tests/packaging/exported_symbols.txt lists the result. Readable as C: lean.h uses it too.
#pragma once

#if defined(__GNUC__) && !defined(_WIN32)
#define LEAN_API __attribute__((visibility("default")))
#else
#define LEAN_API
#endif

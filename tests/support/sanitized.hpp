// LEAN_TEST_SANITIZED: a sanitizer has a malloc and an address space of its own. g++ and clang say so in two ways.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LEAN_TEST_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LEAN_TEST_SANITIZED
#endif
#endif

# lean_flags: how every target of this project is compiled. Linked PRIVATE, so nothing of it reaches a user.
add_library(lean_flags INTERFACE)
target_compile_features(lean_flags INTERFACE cxx_std_20)

# No fusion the source does not ask for: a merge must give the same bits whichever side comes first.
target_compile_options(lean_flags INTERFACE -ffp-contract=off -Wall -Wextra -Wconversion -Wsign-conversion)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  target_compile_options(lean_flags INTERFACE -Wno-restrict)  # false reports inside std::string: GCC bug 105651
endif()

if(LEAN_WERROR)
  target_compile_options(lean_flags INTERFACE -Werror)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # These depend on what the optimiser of a later release happens to inline: reported, not fatal.
    target_compile_options(lean_flags INTERFACE -Wno-error=array-bounds -Wno-error=dangling-reference
      -Wno-error=maybe-uninitialized -Wno-error=stringop-overflow -Wno-error=stringop-overread)
  endif()
endif()

# libFuzzer ships with clang's sanitizers; other builds drive the fuzz target with random bytes of their own.
set(LEAN_LIBFUZZER OFF)
if(LEAN_SANITIZE)
  target_compile_options(lean_flags INTERFACE -fsanitize=${LEAN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(lean_flags INTERFACE -fsanitize=${LEAN_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND LEAN_SANITIZE MATCHES "address")
    set(LEAN_LIBFUZZER ON)
    target_compile_options(lean_flags INTERFACE -fsanitize=fuzzer-no-link)
    target_link_options(lean_flags INTERFACE -fsanitize=fuzzer-no-link)
  endif()
endif()

# lean_add_test(name sources...): a GoogleTest executable that sees every room, spread over LEAN_TEST_SHARDS processes.
# Each process leaves test-results/<entry>.json, from which tools/run_tests.py counts single tests.
function(lean_add_test name)
  if(NOT ARGN)
    return()
  endif()
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE lean_flags lean_objects lean_test_support lean_reference GTest::gtest_main)
  target_precompile_headers(${name} PRIVATE <gtest/gtest.h>)  # half of what a test costs to compile
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${name} PRIVATE -fpch-preprocess)  # for ccache, with its sloppiness pch_defines,time_macros
  endif()
  math(EXPR last_shard "${LEAN_TEST_SHARDS} - 1")
  foreach(shard RANGE ${last_shard})
    set(entry ${name}.${shard})
    add_test(NAME ${entry} COMMAND ${name} --gtest_brief=1)
    lean_set_test_environment(${entry}
      GTEST_TOTAL_SHARDS=${LEAN_TEST_SHARDS} GTEST_SHARD_INDEX=${shard}
      GTEST_OUTPUT=json:${PROJECT_BINARY_DIR}/test-results/${entry}.json)
  endforeach()
endfunction()

# Sanitizer builds run reduced sizes and stop at the first report.
function(lean_set_test_environment entry)
  set(environment ${ARGN})
  if(LEAN_SANITIZE)
    list(APPEND environment LEAN_TEST_REDUCED=1 ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
      TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1)
  endif()
  set_tests_properties(${entry} PROPERTIES ENVIRONMENT "${environment}" TIMEOUT 1500)
endfunction()

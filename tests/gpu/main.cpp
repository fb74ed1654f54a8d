// main() of gpu_tests: GoogleTest's, on a GPU. tools/gpu_test.py runs each test in a process of its own, with a limit.
#include <gtest/gtest.h>

#include <cstdio>

#include "support/target.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (testing::FLAGS_gtest_list_tests) return RUN_ALL_TESTS();
  if (const std::string error = lean::support::choose_target("cuda"); !error.empty()) {
    std::fprintf(stderr, "gpu_tests: %s\n", error.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}

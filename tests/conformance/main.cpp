// main() of conformance_tests: GoogleTest's, and `--case=LINE --seed=N`, which runs one case as failures print it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "support/run_and_check.hpp"

namespace {

int run_one(const char* line, const char* seed) {
  std::string error;
  auto description = lean::support::parse_case(line, error);
  if (!description) {
    std::fprintf(stderr, "--case: %s\n", error.c_str());
    return 2;
  }
  if (seed != nullptr) description->seed = std::strtoull(seed, nullptr, 10);
  try {
    const auto result = lean::support::run_and_check(*description);
    std::printf("%s: %s\n", result ? "passed" : "FAILED", result ? line : result.message());
    return result ? 0 : 1;
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "--case: %s\n", fault.what());
    return 2;
  }
}

const char* value_of(const char* argument, const char* option) {
  const std::size_t length = std::strlen(option);
  return std::strncmp(argument, option, length) == 0 ? argument + length : nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* line = nullptr;
  const char* seed = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (const char* value = value_of(argv[i], "--case=")) line = value;
    if (const char* value = value_of(argv[i], "--seed=")) seed = value;
  }
  return line != nullptr ? run_one(line, seed) : RUN_ALL_TESTS();
}

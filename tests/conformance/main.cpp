// main() of conformance_tests: GoogleTest's, and
//   --backend=cuda, or LEAN_TEST_BACKEND=cuda: every case on the GPU; what the backend declines is counted
//   --case=LINE --seed=N: one case, as failures print it
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "support/run_and_check.hpp"
#include "support/target.hpp"

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
    const bool declined = result && lean::support::tally().served == 0;
    std::printf("%s: %s\n", declined ? "declined" : (result ? "passed" : "FAILED"), result ? line : result.message());
    return result && !declined ? 0 : 1;
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "--case: %s\n", fault.what());
    return 2;
  }
}

const char* value_of(const char* argument, const char* option) {
  const std::size_t length = std::strlen(option);
  return std::strncmp(argument, option, length) == 0 ? argument + length : nullptr;
}

/// A test whose every case is declined proves nothing: it must skip itself by name or have a case that is served.
class DeclinedCases : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { before_ = lean::support::tally(); }
  void OnTestEnd(const testing::TestInfo& test) override {
    const lean::support::Tally after = lean::support::tally();
    const bool declined_all = after.refused > before_.refused && after.served == before_.served;
    if (declined_all && !test.result()->Skipped()) ADD_FAILURE() << "the target declined every case of this test";
  }
  lean::support::Tally before_;
};

/// GoogleTest's run; on a GPU it says what was served, and fails when all was declined.
int run_all() {
  if (lean::support::on_cuda()) testing::UnitTest::GetInstance()->listeners().Append(new DeclinedCases);
  const int result = RUN_ALL_TESTS();
  if (!lean::support::on_cuda() || testing::FLAGS_gtest_list_tests) return result;
  const lean::support::Tally cases = lean::support::tally();
  std::printf("%lld cases served, %lld refused\n", static_cast<long long>(cases.served), static_cast<long long>(cases.refused));
  return cases.served == 0 && cases.refused > 0 ? 1 : result;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* line = nullptr;
  const char* seed = nullptr;
  const char* backend = std::getenv("LEAN_TEST_BACKEND");
  for (int i = 1; i < argc; ++i) {
    if (const char* value = value_of(argv[i], "--case=")) line = value;
    if (const char* value = value_of(argv[i], "--seed=")) seed = value;
    if (const char* value = value_of(argv[i], "--backend=")) backend = value;
  }
  if (backend != nullptr) {
    if (const std::string error = lean::support::choose_target(backend); !error.empty()) {
      std::fprintf(stderr, "--backend: %s\n", error.c_str());
      return 2;
    }
  }
  return line != nullptr ? run_one(line, seed) : run_all();
}

// Feeds the fuzz target random bytes where there is no libFuzzer. Takes libFuzzer's options of the same name:
//   fuzz_decode [-max_total_time=SECONDS] [-seed=N] [-runs=N]
// Input i is made from seed + i alone: `-seed=S+i -runs=1` repeats a run that failed.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "support/random.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

long long option(int argc, char** argv, const char* name, long long otherwise) {
  const std::size_t length = std::strlen(name);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], name, length) == 0) return std::atoll(argv[i] + length);
  }
  return otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr std::size_t kInputBytes = 160;  // a whole call takes about that much
  const long long seconds = option(argc, argv, "-max_total_time=", 60);
  const long long runs = option(argc, argv, "-runs=", -1);
  const auto seed = static_cast<std::uint64_t>(option(argc, argv, "-seed=", 1));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::vector<std::uint8_t> input(kInputBytes);
  long long run = 0;
  for (; run != runs && std::chrono::steady_clock::now() < end; ++run) {
    lean::support::Stream random(seed + static_cast<std::uint64_t>(run));
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random.bits());
    std::fprintf(stderr, run % 1000 == 0 ? "run %lld\n" : "", run);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%lld runs from seed %llu, no fault\n", run, static_cast<unsigned long long>(seed));
  return 0;
}

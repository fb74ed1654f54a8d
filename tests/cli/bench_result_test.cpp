// Rows that something else on the machine spoiled are told from those it did not.
#include <gtest/gtest.h>

#include <string>

#include "cli/bench_result.hpp"

namespace lean::cli {
namespace {

BenchLine line_of(std::vector<double> call_us, std::vector<double> ceiling_us) {
  BenchLine line{.row = "row", .impl = "lean", .threads = 2};
  line.call.us = std::move(call_us);
  line.ceiling.us = std::move(ceiling_us);
  return line;
}

TEST(BenchResult, RoundsThatAgreeAreNotNoisy) {
  EXPECT_EQ(line_of({100, 101, 103, 129, 400}, {90, 91, 91, 95, 99}).noise(), "");  // one round in five is what the median is for
  EXPECT_EQ(line_of({100, 100, 100}, {109, 109, 109}).noise(), "");
  EXPECT_EQ(BenchLine{.row = "not measured"}.noise(), "");
}

TEST(BenchResult, AMedianFarFromTheBestRoundIsNoisy) {
  EXPECT_NE(line_of({100, 131, 140}, {90, 91, 92}).noise().find("of the call took 1.31 times the best"), std::string::npos);
  EXPECT_NE(line_of({100, 100, 100}, {50, 90, 95}).noise().find("of the pure read took 1.80 times the best"), std::string::npos);
}

TEST(BenchResult, FasterThanThePureReadIsNoisy) {
  EXPECT_NE(line_of({100, 100, 100}, {111, 111, 111}).noise().find("faster than the pure read"), std::string::npos);
}

TEST(BenchResult, NoisyLinesAreCountedAndInNoFigure) {
  const BenchLine quiet = line_of({100, 100, 100}, {90, 90, 90});
  const std::string text = summary_text({quiet, line_of({100, 100, 100}, {2710, 2710, 2710})});
  EXPECT_NE(text.find("1 rows, geometric mean 90.0 %"), std::string::npos) << text;
  EXPECT_NE(text.find("noisy: 1 line"), std::string::npos) << text;
}

TEST(BenchResult, ARivalLosesOrWinsByQuietRoundsOnly) {
  const BenchLine slow = line_of({100, 100, 100}, {90, 90, 90});
  BenchLine rival = line_of({85, 86, 87}, {90, 90, 90});
  rival.impl = "lean/fixed_split";
  EXPECT_NE(summary_text({slow, rival}).find("slower than lean/fixed_split: row"), std::string::npos);
  rival.ceiling.us = {900, 900, 900};
  EXPECT_EQ(summary_text({slow, rival}).find("slower than"), std::string::npos);
}

}  // namespace
}  // namespace lean::cli

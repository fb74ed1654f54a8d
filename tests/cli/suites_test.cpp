// The declared matrix: ids that name one row each, rows that the library takes, and what a run that was stopped left behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "cli/bad_argument.hpp"
#include "cli/earlier_lines.hpp"
#include "cli/row_progress.hpp"
#include "cli/suites/matrix.hpp"
#include "lean/lean.hpp"

namespace lean::cli {
namespace {

std::vector<BenchRow> rows_of(const std::vector<Suite>& suites, const std::string& tier = "a") {
  return select_rows({.suites = suites, .tier = tier, .trace = "", .cpu_kv_bytes = 1 << 20});
}

const BenchRow* find(const std::vector<BenchRow>& rows, const std::string& id) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const BenchRow& row) { return row.id == id; });
  return found == rows.end() ? nullptr : &*found;
}

/// What a call has to read, and multiply, where values are narrower than keys, or a part of them.
TEST(ProblemSpec, CountsNarrowAndLatentValues) {
  ProblemSpec spec{.kv_lens = {10, 30}, .q_heads = 4, .kv_heads = 2, .head_dim = 24, .value_dim = 16, .q_tokens = 2};
  EXPECT_EQ(spec.kv_bytes(), 40 * 2 * (24 + 16) * 2);
  EXPECT_EQ(spec.products(), 2 * 40 * 4 * (24 + 16));
  EXPECT_EQ(spec.output_elements(), 2 * 2 * 4 * 16);
  EXPECT_EQ(spec.kv_tensors(), 2);
  spec.values_in_keys = true;
  EXPECT_EQ(spec.kv_bytes(), 40 * 2 * 24 * 2);
  EXPECT_EQ(spec.products(), 2 * 40 * 4 * (24 + 16));
  EXPECT_EQ(spec.kv_tensors(), 1);
  const ProblemShape shape(spec);
  EXPECT_EQ(shape.problem().value_dim, 16);
  EXPECT_EQ(shape.problem().v.strides.token, shape.problem().k.strides.token);
  EXPECT_EQ(shape.problem().o.strides.head, 16);
  spec = {.kv_lens = {1}, .q_heads = 2048, .kv_heads = 1, .head_dim = 8, .q_tokens = 1 << 20};
  EXPECT_EQ(ProblemShape(spec).problem().q.strides.sequence, std::int64_t{1} << 34);
}

TEST(Suites, EveryIdNamesOneRow) {
  const std::vector<BenchRow> rows = rows_of(all_suites());
  std::set<std::string> ids;
  for (const BenchRow& row : rows) EXPECT_TRUE(ids.insert(row.id).second) << row.id;
  EXPECT_GT(rows.size(), 700U);
}

TEST(Suites, TogetherTheyHaveWhatEachHas) {
  const std::vector<BenchRow> all = rows_of(all_suites());
  std::set<std::string> ids;
  for (const Suite suite : all_suites()) {
    const std::vector<BenchRow> rows = rows_of({suite});
    EXPECT_FALSE(rows.empty()) << name_of(suite);
    for (const BenchRow& row : rows) {
      EXPECT_EQ(row.suite, suite) << row.id;
      const BenchRow* const same = find(all, row.id);
      ASSERT_NE(same, nullptr) << row.id;
      EXPECT_EQ(same->spec, row.spec) << row.id;
      ids.insert(row.id);
    }
  }
  EXPECT_EQ(ids.size(), all.size());
}

/// Rows of --energy have ids of their own, and are in nobody's suite or tier but theirs.
TEST(Suites, RowsOfEnergyAreChosenByThemselves) {
  const std::vector<BenchRow> energy = rows_of({Suite::kEnergy});
  ASSERT_EQ(energy.size(), 4U);
  std::vector<BenchRow> times = rows_of(all_suites());
  const std::vector<BenchRow> tiers = rows_of({}, "all");
  times.insert(times.end(), tiers.begin(), tiers.end());
  for (const BenchRow& row : energy) {
    EXPECT_EQ(row.suite, Suite::kEnergy) << row.id;
    EXPECT_TRUE(row.id.starts_with("energy ")) << row.id;
    EXPECT_EQ(find(times, row.id), nullptr) << row.id;
  }
  EXPECT_THROW((void)parse_suites(name_of(Suite::kEnergy)), BadArgument);
  EXPECT_EQ(find(energy, "energy L8B 1x128k")->spec, find(times, "L8B 1x128k")->spec);
}

TEST(Suites, TiersKeepTheirRows) {
  EXPECT_EQ(rows_of({}, "a").size(), 34U);
  EXPECT_EQ(rows_of({}, "b").size(), 445U);
  EXPECT_EQ(rows_of({}, "all").size(), 479U);
}

TEST(Suites, RowsThatWereAskedForByNameAreThere) {
  const std::vector<BenchRow> rows = rows_of({Suite::kShort});
  for (const char* id :
       {"short 5x700 32/8 d128 bf16 bhsd n_q1", "short 100x600 32/8 d128 bf16 bhsd n_q1", "short 200x300 32/8 d128 bf16 bhsd n_q1",
        "short 1x32000 16/1 d128 bf16 bhsd n_q1", "tileops 1x512 pages of 128 nhd 16/16 d128 fp16 bshd n_q1",
        "tileops 2x1024 pages of 256 nhd 8/8 d64 fp16 bshd n_q1"}) {
    EXPECT_NE(find(rows, id), nullptr) << id;
  }
  for (const BenchRow& row : rows) {
    if (row.id.starts_with("tileops")) {
      EXPECT_EQ(row.spec.kv_bytes(), 4 << 20) << row.id;
    }
  }
}

/// What a feature costs is told by the row that differs in nothing else.
TEST(Suites, EveryFeatureHasTheRowWithoutIt) {
  const std::vector<BenchRow> rows = rows_of({Suite::kFeatures});
  for (const BenchRow& row : rows) {
    ProblemSpec plain{.kv_lens = row.spec.kv_lens,
                      .q_heads = row.spec.q_heads,
                      .kv_heads = row.spec.kv_heads,
                      .head_dim = row.spec.head_dim,
                      .dtype = row.spec.dtype};
    plain.layout = natural_layout(plain.kv_lens);
    const auto is_plain = [&](const BenchRow& other) { return other.spec == plain; };
    EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), is_plain)) << row.id;
  }
}

TEST(Suites, FlatnessVariesTheOutputsAlone) {
  std::map<std::int64_t, int> outputs;
  for (const BenchRow& row : rows_of({Suite::kFlatness})) {
    EXPECT_TRUE(row.id.starts_with(kFlatnessPrefix));
    EXPECT_NEAR(static_cast<double>(row.spec.kv_bytes()), 512.0 * (1 << 20), 0.001 * 512 * (1 << 20)) << row.id;
    ++outputs[row.spec.batch() * row.spec.kv_heads];
  }
  EXPECT_EQ(outputs.begin()->first, 1);
  EXPECT_EQ(outputs.rbegin()->first, 1024);
  EXPECT_EQ(outputs.size(), 26U);
}

/// An address for every tensor; nobody reads what is there.
Problem with_data(Problem problem) {
  alignas(64) static float inputs[16];
  alignas(64) static float outputs[16];
  alignas(64) static float lse[16];
  problem.q.data = problem.k.data = problem.v.data = inputs;
  problem.o.data = outputs;
  problem.lse.data = lse;
  return problem;
}

TEST(Suites, TheLibraryTakesEveryRow) {
  for (const BenchRow& row : rows_of(all_suites())) {
    const ProblemShape shape(row.spec);
    const WorkspaceSize need = workspace_size(with_data(shape.problem()), Options{});
    EXPECT_TRUE(need.status.ok()) << row.id << ": " << need.status.message;
    EXPECT_GT(need.scratch_bytes, 0U) << row.id;
    for (const std::int32_t tokens : row.spec.kv_lens) EXPECT_GE(tokens, row.spec.q_tokens) << row.id;
  }
}

TEST(Suites, NamesAreReadBack) {
  EXPECT_EQ(parse_suites("all"), all_suites());
  for (const Suite suite : all_suites()) EXPECT_EQ(parse_suites(name_of(suite)), std::vector<Suite>{suite});
  EXPECT_EQ(parse_suites("wide,paper,wide"), (std::vector<Suite>{Suite::kWide, Suite::kPaper}));
  for (const char* text : {"", "paper,", "Paper", "paper;wide", "tier"})
    EXPECT_THROW((void)parse_suites(text), BadArgument) << text;
}

TEST(RowProgress, TimeLeftIsInProportionToWhatIsDone) {
  EXPECT_EQ(time_left_text(0, 10, 5), "");
  EXPECT_EQ(time_left_text(9, 10, 9), "about 10 s left");
  EXPECT_EQ(time_left_text(1, 10, 5), "about 50 s left");
  EXPECT_EQ(time_left_text(1, 13, 10), "about 2 min left");
  EXPECT_EQ(time_left_text(1, 101, 360), "about 10.0 h left");
}

class Earlier : public testing::Test {
 protected:
  void SetUp() override { path_ = testing::TempDir() + "/earlier_" + std::to_string(getpid()) + ".jsonl"; }
  void TearDown() override { std::remove(path_.c_str()); }

  EarlierLines read(const std::string& text) const {
    std::ofstream(path_) << text;
    return {path_, "a machine"};
  }
  static std::string line(const char* row, const char* impl, const char* rest = "") {
    return std::string(R"({"row":")") + row + R"(","impl":")" + impl + R"(","threads":2,"device":"a machine")" + rest + "}\n";
  }

  std::string path_;
  LineGroup group_{.row = "r", .threads = 2, .impls = {"lean", "lean/fixed_split"}};
};

TEST_F(Earlier, WhatIsCompleteIsKept) {
  const std::string text = line("r", "lean") + line("r", "lean/fixed_split") + line("other", "lean");
  EarlierLines earlier = read(text);
  EXPECT_TRUE(earlier.has(group_));
  EXPECT_FALSE(earlier.has({.row = "r", .threads = 1, .impls = {"lean"}}));
  EXPECT_EQ(earlier.text(), text);
  EXPECT_EQ(EarlierLines("/no such file", "a machine").text(), "");
}

TEST_F(Earlier, WhatIsPartlyThereIsDropped) {
  EarlierLines earlier = read(line("r", "lean") + line("other", "lean"));
  EXPECT_FALSE(earlier.has(group_));
  EXPECT_EQ(earlier.text(), line("other", "lean"));
}

TEST_F(Earlier, WhatTimeCutOffIsMeasuredAgain) {
  const std::string cut = std::string(R"(,"note":")") + kOutOfTime + '"';
  EarlierLines earlier = read(line("r", "lean", cut.c_str()) + line("r", "lean/fixed_split", cut.c_str()));
  EXPECT_FALSE(earlier.has(group_));
  EXPECT_EQ(earlier.text(), "");
}

TEST_F(Earlier, WhatWasSkippedIsDecidedAgain) {
  EarlierLines skipped =
      read(line("r", "lean", R"(,"note":"skipped: needs memory")") + line("r", "lean/fixed_split", R"(,"note":null)"));
  EXPECT_FALSE(skipped.has(group_));
  EXPECT_EQ(skipped.text(), "");
}

TEST_F(Earlier, ARowOfOtherLengthsIsRefused) {
  EarlierLines earlier = read(line("r", "lean", R"(,"lens":[2048])") + line("r", "lean/fixed_split", R"(,"lens":[2048])"));
  LineGroup same = group_;
  same.lens = {2048};
  EXPECT_TRUE(earlier.has(same));
  same.lens = {8192};  // the row's name is the same with another --kv-mib
  EXPECT_THROW((void)earlier.has(same), BadArgument);
}

TEST_F(Earlier, ALineThatWasBeingWrittenIsLeftOut) {
  EXPECT_EQ(read(line("r", "lean") + R"({"row":"r","impl":"le)").text(), line("r", "lean"));
}

TEST_F(Earlier, OtherFilesAndOtherDevicesAreRefused) {
  for (const char* text : {"notes without an end of line", "{\"notes\":", "{\"row\":\"r\",\"impl\":\"lean\",\"threads\":\"two\"}\n",
                           "ContextTokens\n", "[1]\n", "{\"row\":1,\"impl\":2}\n", "{\"impl\":\"lean\"}\n"}) {
    EXPECT_THROW((void)read(text), BadArgument) << text;
  }
  EXPECT_THROW((void)read(R"({"row":"r","impl":"lean","device":"another machine"})"
                          "\n"),
               BadArgument);
}

}  // namespace
}  // namespace lean::cli

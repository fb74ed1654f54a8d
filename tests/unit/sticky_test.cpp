// Sticky faults: the first code stays, and the entry that it is about is looked up once, by whoever is done first.
#include "fixup/sticky.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "backends/cpu/thread_atomic.hpp"
#include "support/executors.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using cpu::ThreadAtomic;
using support::ExecutorKind;
using support::full_or_reduced;
using support::TestExecutor;

/// A length and a page id that cannot be: of 12 tokens, and of 3 pages of 4 tokens.
struct Wrong {
  std::array<std::int32_t, 2> lengths = {12, 13};
  std::array<std::int32_t, 6> table = {0, 1, 2, 0, 7, 1};

  [[nodiscard]] Problem problem() const {
    Problem p{.batch = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 1, .kv_capacity = 12, .kv_lengths = lengths.data()};
    p.pages = {.page_tokens = 4, .page_count = 3, .block_table = table.data(), .block_table_stride = 3};
    return p;
  }
};

void name(const Wrong& wrong, StateHeader& header) { name_fault<ThreadAtomic>(wrong.problem(), header); }

TEST(Sticky, R25_TheFirstCodeStaysAndItsEntryIsLookedUpOnce) {
  Wrong wrong;
  StateHeader header;
  name(wrong, header);
  EXPECT_FALSE(has_fault<ThreadAtomic>(header));
  EXPECT_FALSE(header.fault.found()) << "nobody reported one";
  EXPECT_TRUE(report_sticky<ThreadAtomic>(header, StatusCode::kBadLengths));
  EXPECT_FALSE(report_sticky<ThreadAtomic>(header, StatusCode::kBadPageIndex));
  EXPECT_TRUE(has_fault<ThreadAtomic>(header));
  name(wrong, header);
  EXPECT_EQ(header.fault.array, LengthFault::Array::kKvLengths);
  EXPECT_EQ(header.fault.index, 1);
  EXPECT_EQ(header.fault.seen, 13);
  wrong.lengths = {-5, 12};
  name(wrong, header);
  EXPECT_EQ(header.fault.seen, 13) << "a later call's";
  header = {};
  EXPECT_TRUE(report_sticky<ThreadAtomic>(header, StatusCode::kBadLengths));
  name(wrong, header);
  EXPECT_EQ(header.fault.index, 0);
  EXPECT_EQ(header.fault.seen, -5);
}

TEST(Sticky, R26_TheEntryIsOfTheKindThatTheCodeSays) {
  const Wrong wrong;
  StateHeader header{.sticky_code = static_cast<Counter>(StatusCode::kBadPageIndex)};
  name(wrong, header);
  EXPECT_EQ(header.fault.array, LengthFault::Array::kBlockTable);
  EXPECT_EQ(header.fault.index, 1);
  EXPECT_EQ(header.fault.page, 1);
  EXPECT_EQ(header.fault.seen, 7);
  for (const StatusCode code : {StatusCode::kWorkspaceDirty, StatusCode::kWorkspaceInUse}) {
    header = {.sticky_code = static_cast<Counter>(code)};
    name(wrong, header);
    EXPECT_FALSE(header.fault.found()) << "no entry has such a fault";
  }
}

/// As on a device: many report, some of one kind and some of another, and many are done at the same time. ThreadSanitizer sees who
/// writes the entry.
TEST(Sticky, R25_OfManyWhoAreDoneAtOnceOneNamesTheEntry) {
  constexpr std::int32_t kWorkers = 8;
  const Wrong wrong;
  const TestExecutor executor(ExecutorKind::kPermuted);
  for (int round = 0; round < full_or_reduced(500, 50); ++round) {
    StateHeader header;
    struct Call {
      const Wrong& wrong;
      StateHeader& header;
    } call{wrong, header};
    const auto work = [](void* opaque, std::int32_t worker) {
      const auto& [asked, state] = *static_cast<Call*>(opaque);
      report_sticky<ThreadAtomic>(state, worker % 2 == 0 ? StatusCode::kBadLengths : StatusCode::kBadPageIndex);
      if (has_fault<ThreadAtomic>(state)) name_fault<ThreadAtomic>(asked.problem(), state);
    };
    executor.get()->run(executor.get()->context, kWorkers, work, &call);
    const bool of_page = static_cast<StatusCode>(header.sticky_code) == StatusCode::kBadPageIndex;
    ASSERT_EQ(header.fault.array, of_page ? LengthFault::Array::kBlockTable : LengthFault::Array::kKvLengths);
    ASSERT_EQ(header.fault.seen, of_page ? 7 : 13);
  }
}

}  // namespace
}  // namespace lean::fixup

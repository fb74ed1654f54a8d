// TestProblem's pages: a shuffled pool with pages that nobody owns, and tables whose tails hold what must never be read.
#include <algorithm>
#include <climits>
#include <numeric>

#include "base/int_math.hpp"
#include "problem/sequence.hpp"
#include "support/random.hpp"
#include "support/test_problem.hpp"

namespace lean::support {
namespace {

constexpr std::int32_t kTails[] = {2'147'480'000, -1, INT_MIN, INT_MAX};

}  // namespace

void TestProblem::make_pages() {
  const auto seed = static_cast<std::int64_t>(case_.seed);
  std::vector<std::int32_t> pages;  // of each sequence
  for (const std::int32_t tokens : case_.lens) pages.push_back(static_cast<std::int32_t>(ceil_div(tokens, case_.page_tokens)));
  const std::int32_t used = std::accumulate(pages.begin(), pages.end(), 0);
  std::vector<std::int32_t> pool(static_cast<std::size_t>(used) + 3);
  std::iota(pool.begin(), pool.end(), 0);
  for (std::size_t i = pool.size(); i > 1; --i) {
    std::swap(pool[i - 1],
              pool[static_cast<std::size_t>(pick(key_of({seed, 30, static_cast<std::int64_t>(i)}), static_cast<std::int64_t>(i)))]);
  }
  problem_.pages.page_tokens = case_.page_tokens;
  problem_.pages.page_count = static_cast<std::int64_t>(pool.size());
  std::vector<std::int32_t> table;
  std::vector<std::int32_t> indptr{0};
  const auto row = static_cast<std::int32_t>(ceil_div(problem_.kv_capacity, case_.page_tokens));
  const std::int32_t columns = row + 2;
  std::size_t next = 0;
  for (const std::int32_t count : pages) {
    for (std::int32_t p = 0; p < count; ++p) table.push_back(pool[next++]);
    for (std::int32_t p = count; !case_.csr && p < columns; ++p) table.push_back(kTails[static_cast<std::size_t>(p) % 4]);
    indptr.push_back(static_cast<std::int32_t>(next));
  }
  if (!case_.csr && !pages.empty()) table.resize(table.size() - 2);  // the last row ends with the capacity
  page_table_ = GuardedBuffer(table.size() * sizeof(std::int32_t), case_.guard);
  std::copy(table.begin(), table.end(), page_table());
  if (!case_.csr) {
    problem_.pages.block_table = page_table();
    problem_.pages.block_table_stride = columns;
    return;
  }
  page_indptr_ = GuardedBuffer(indptr.size() * sizeof(std::int32_t), case_.guard);
  std::copy(indptr.begin(), indptr.end(), page_indptr());
  problem_.pages.page_indices = page_table();
  problem_.pages.page_indptr = page_indptr();
}

std::int32_t* TestProblem::page_ids(std::int64_t sequence) const {
  return page_table() + (case_.csr ? page_indptr()[sequence] : sequence * problem_.pages.block_table_stride);
}

}  // namespace lean::support

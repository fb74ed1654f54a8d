#include "cli/suites/matrix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "cli/suites/declarations.hpp"

namespace lean::cli {
namespace {

bool has(const std::vector<Suite>& suites, Suite suite) { return std::find(suites.begin(), suites.end(), suite) != suites.end(); }

std::vector<BenchRow> every_row(const Selection& selection) {
  Matrix matrix;
  suites::add_tier_a(matrix);
  suites::add_flatness(matrix);
  suites::add_ragged(matrix, selection.trace);
  suites::add_features(matrix);
  suites::add_serving(matrix);
  suites::add_short(matrix);
  suites::add_paper(matrix);
  suites::add_models(matrix);
  suites::add_wide(matrix);
  suites::add_plain_beside_features(matrix);
  suites::add_cpu(matrix, selection.cpu_kv_bytes);
  suites::add_energy(matrix);
  return matrix.rows();
}

bool in_tier(const BenchRow& row, const std::string& tier) {
  return row.tier != Tier::kNone && (tier == "all" || tier[0] == static_cast<char>(row.tier));
}

}  // namespace

void Matrix::begin(Suite suite, Tier tier) {
  suite_ = suite;
  tier_ = tier;
}

void Matrix::add(const std::string& name, ProblemSpec spec, std::string missing) {
  for (BenchRow& row : rows_) {
    if (!row.missing.empty() || !missing.empty() || row.spec != spec) continue;
    if (!has(row.suites, suite_)) row.suites.push_back(suite_);
    return;
  }
  add_again(name, std::move(spec), std::move(missing));
}

void Matrix::add_again(const std::string& name, ProblemSpec spec, std::string missing) {
  const std::string kv_type = spec.kv_dtype ? fmt::format(" {}", name_of(*spec.kv_dtype)) : "";
  const std::string id = fmt::format("{} {}/{} d{} {}{} {} n_q{}", name, spec.q_heads, spec.kv_heads, spec.head_dim,
                                     name_of(spec.dtype), kv_type, name_of(spec.layout), spec.q_tokens);
  add_as(id, std::move(spec), std::move(missing));
}

void Matrix::add_as(const std::string& id, ProblemSpec spec, std::string missing) {
  rows_.push_back(
      {.id = id, .suite = suite_, .tier = tier_, .spec = std::move(spec), .missing = std::move(missing), .suites = {suite_}});
}

ProblemSpec Matrix::spec_of(const std::string& id) const {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const BenchRow& each) { return each.id == id; });
  if (row == rows_.end()) throw std::logic_error("the matrix has no row " + id);
  return row->spec;
}

std::vector<BenchRow> select_rows(const Selection& selection) {
  std::vector<BenchRow> every = every_row(selection);
  std::vector<BenchRow> rows;
  for (BenchRow& row : every) {
    if (selection.suites.empty()) {
      if (in_tier(row, selection.tier)) rows.push_back(std::move(row));
      continue;
    }
    const auto asked = std::find_if(selection.suites.begin(), selection.suites.end(), [&](Suite s) { return has(row.suites, s); });
    if (asked == selection.suites.end()) continue;
    row.suite = *asked;
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace lean::cli

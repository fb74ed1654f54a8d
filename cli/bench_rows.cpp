#include "cli/bench_rows.hpp"

#include <fmt/format.h>

#include "cli/bad_argument.hpp"
#include "cli/command.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"

namespace lean::cli {
namespace {

std::string to_text(const BenchRow& row) {
  const std::string missing = row.missing.empty() ? "" : "; not in this version: " + row.missing;
  return fmt::format("{:<8} {:<60}  {}{}\n", name_of(row.suite), row.id, describe(row.spec), missing);
}

Json to_json(const BenchRow& row) {
  Json json{{"row", row.id}, {"suite", name_of(row.suite)}};
  add_tier(json, row.tier);
  add_problem(json, row.spec);
  json["kv_bytes"] = row.spec.kv_bytes();
  json["missing"] = row.missing.empty() ? Json(nullptr) : Json(row.missing);
  return json;
}

}  // namespace

std::vector<BenchRow> chosen_rows(const BenchSettings& settings) {
  std::vector<BenchRow> rows = select_rows(settings.rows);
  std::erase_if(rows, [&](const BenchRow& row) { return !std::regex_search(row.id, settings.pattern); });
  if (rows.empty()) throw BadArgument("--rows: no row's id of what was asked for has the pattern; --list shows them");
  return rows;
}

int list_rows(const BenchSettings& settings, bool json) {
  for (const BenchRow& row : chosen_rows(settings)) print(json ? line_of(to_json(row)) : to_text(row));
  return kExitOk;
}

}  // namespace lean::cli

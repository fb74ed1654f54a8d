#include "cli/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>

#include "cli/bad_argument.hpp"

namespace lean::cli {
namespace {

/// Source: Azure LLM inference trace 2023 (Azure/AzurePublicDataset), CC-BY 4.0. Attribution: Patel et al., "Splitwise:
/// Efficient generative LLM inference using phase splitting", ISCA 2024.
constexpr std::int32_t kConv32[] = {374, 1313, 4075, 440, 1040, 463, 1113, 1126, 181,  1068, 181,  2248, 1109, 2669, 4082, 4075,
                                    385, 406,  1389, 393, 1096, 209, 1122, 234,  1313, 413,  1137, 128,  1031, 976,  1013, 1012};

constexpr std::string_view kColumn = "ContextTokens";

/// Cells may stand in quotes, where commas belong to them and two quotes are one (RFC 4180).
std::vector<std::string> cells_of(std::string_view line) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == ',' && !quoted) {
      cells.emplace_back();
    } else if (line[i] != '"') {
      cells.back() += line[i];
    } else if (quoted && i + 1 < line.size() && line[i + 1] == '"') {
      cells.back() += line[i++];
    } else {
      quoted = !quoted;
    }
  }
  return cells;
}

std::size_t column_in(const std::string& path, std::string_view header) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (header.substr(0, kByteOrderMark.size()) == kByteOrderMark) header.remove_prefix(kByteOrderMark.size());
  const auto cells = cells_of(header);
  const auto found = std::find(cells.begin(), cells.end(), kColumn);
  if (found == cells.end()) throw BadArgument("--trace", path, fmt::format("a CSV whose first line names the column {}", kColumn));
  return static_cast<std::size_t>(found - cells.begin());
}

}  // namespace

std::vector<std::int32_t> conv32_lengths() { return {std::begin(kConv32), std::end(kConv32)}; }

std::vector<std::int32_t> pick_lengths(const std::vector<std::int32_t>& all, std::int64_t count, Pick pick) {
  const auto total = static_cast<std::int64_t>(all.size());
  if (count == 0 || count == total) return all;
  const std::int64_t step = pick == Pick::kSpread ? total / count : 1;
  std::vector<std::int32_t> picked;
  for (std::int64_t i = 0; i < count; ++i) picked.push_back(all[static_cast<std::size_t>(i * step)]);
  return picked;
}

std::vector<std::int32_t> trace_lengths(const std::string& path, std::int64_t count, Pick pick) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw BadArgument("--trace", path, "a file that can be read");
  const std::size_t column = column_in(path, line);
  std::vector<std::int32_t> lengths;
  for (std::int64_t number = 2; std::getline(file, line); ++number) {
    const auto cells = cells_of(line);
    if (cells.size() == 1 && cells[0].empty()) continue;
    const std::string cell = column < cells.size() ? cells[column] : std::string();
    std::int32_t tokens = -1;
    const auto parsed = std::from_chars(cell.data(), cell.data() + cell.size(), tokens);
    if (parsed.ec != std::errc() || parsed.ptr != cell.data() + cell.size() || tokens < 0) {
      throw BadArgument("--trace", path, fmt::format("line {} has \"{}\" for {}: a number of tokens", number, cell, kColumn));
    }
    lengths.push_back(tokens);
  }
  const auto total = static_cast<std::int64_t>(lengths.size());
  if (total == 0) throw BadArgument("--trace", path, "a file with at least one request");
  if (count > total) throw BadArgument("--batch", std::to_string(count), fmt::format("the trace has {} requests", total));
  return pick_lengths(lengths, count, pick);
}

}  // namespace lean::cli

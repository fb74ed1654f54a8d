#include "cli/earlier_lines.hpp"

#include <algorithm>
#include <fstream>

#include "cli/bad_argument.hpp"
#include "cli/problem_json.hpp"

namespace lean::cli {
namespace {

template <typename T>
T field(const Json& json, const char* key, T otherwise) {
  return json.contains(key) && !json[key].is_null() ? json[key].get<T>() : otherwise;
}

}  // namespace

EarlierLines::EarlierLines(const std::string& path, const std::string& device) {
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    if (file.eof()) break;  // no end of line: the run was stopped while it wrote
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object() || !json.contains("row") || !json.contains("impl"))
      throw BadArgument("--out", path, "a result file, to go on with");
    if (const auto other = field<std::string>(json, "device", device); other != device)
      throw BadArgument("--out", path, "a result file of this device, \"" + device + "\"; it has lines of \"" + other + "\"");
    if (field<std::string>(json, "note", "") == kOutOfTime) continue;
    lines_.push_back({.row = json["row"].get<std::string>(),
                      .threads = field(json, "threads", 0),
                      .impl = json["impl"].get<std::string>(),
                      .text = text + "\n"});
  }
}

bool EarlierLines::has(const LineGroup& group) {
  const auto is_of = [&](const Line& line) { return line.row == group.row && line.threads == group.threads; };
  const auto is_there = [&](const std::string& impl) {
    return std::any_of(lines_.begin(), lines_.end(), [&](const Line& line) { return is_of(line) && line.impl == impl; });
  };
  if (std::all_of(group.impls.begin(), group.impls.end(), is_there)) return true;
  std::erase_if(lines_, is_of);
  return false;
}

std::string EarlierLines::text() const {
  std::string text;
  for (const Line& line : lines_) text += line.text;
  return text;
}

}  // namespace lean::cli

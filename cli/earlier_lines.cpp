#include "cli/earlier_lines.hpp"

#include <algorithm>
#include <fstream>
#include <string_view>
#include <utility>

#include "cli/bad_argument.hpp"
#include "cli/problem_json.hpp"

namespace lean::cli {
namespace {

/// What a line has under a key, which may be null; throws Json::exception where it is of another type.
template <typename T>
T field(const Json& json, const char* key, T otherwise) {
  return json.contains(key) && !json[key].is_null() ? json[key].get<T>() : otherwise;
}

constexpr const char* kResultFile = "a result file, to go on with";

/// How each line of a result file begins: to_json() writes the row first.
constexpr std::string_view kLineBegin = R"({"row":")";

/// Whether a line without an end may be one of ours, the run having been stopped while it wrote.
bool is_cut_off(std::string_view text) {
  const std::size_t length = std::min(text.size(), kLineBegin.size());
  return text.substr(0, length) == kLineBegin.substr(0, length);
}

}  // namespace

EarlierLines::EarlierLines(const std::string& path, const std::string& device) : path_(path) {
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    if (file.eof() && is_cut_off(text)) break;
    const Json json = Json::parse(text, nullptr, false);
    std::string other = device;
    try {
      if (!json.is_object()) throw BadArgument("--out", path, kResultFile);
      other = field(json, "device", device);
      Line line{.row = json.at("row").get<std::string>(),
                .lens = field(json, "lens", std::vector<std::int32_t>{}),
                .threads = field(json, "threads", 0),
                .impl = json.at("impl").get<std::string>(),
                .text = text + "\n"};
      if (!field<std::string>(json, "note", "").starts_with(kSkipped)) lines_.push_back(std::move(line));
    } catch (const Json::exception&) {
      throw BadArgument("--out", path, kResultFile);
    }
    if (other != device)
      throw BadArgument("--out", path, "a result file of this device, \"" + device + "\"; it has lines of \"" + other + "\"");
  }
}

bool EarlierLines::has(const LineGroup& group) {
  const auto is_of = [&](const Line& line) { return line.row == group.row && line.threads == group.threads; };
  if (std::any_of(lines_.begin(), lines_.end(), [&](const Line& line) { return is_of(line) && line.lens != group.lens; }))
    throw BadArgument("--out", path_,
                      "a result file of the same --kv-mib and --trace; its row \"" + group.row + "\" has other lengths");
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

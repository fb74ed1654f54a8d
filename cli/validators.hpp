// What the values of options must be. A value that is not is answered as every bad argument is, "--option = value: allowed", where
// CLI11's own checks have words, and bounds, of their own.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cli/bad_argument.hpp"

namespace lean::cli {

/// What stands between the commas: an empty item too, which no list means.
inline std::vector<std::string> items_of(std::string_view text) {
  std::vector<std::string> items;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    items.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

template <typename T>
std::string number_text(T value) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

/// A decimal number in [low, high].
template <typename T>
T number_in(const std::string& option, const std::string& text, T low, T high) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || !(value >= low && value <= high)) {
    const std::string kind = std::is_integral_v<T> ? "a whole number from " : "a number from ";
    throw BadArgument(option, text, kind + number_text(low) + " to " + number_text(high));
  }
  return value;
}

/// The same for Option::transform(), so that nothing reads the text in another way.
template <typename T>
CLI::Validator in_range(const std::string& option, T low, T high) {
  const auto check = [=](std::string& text) {
    text = number_text(number_in(option, text, low, high));
    return std::string();
  };
  return {check, number_text(low) + " to " + number_text(high), option};
}

/// One of a few words.
inline CLI::Validator one_of(const std::string& option, const std::vector<std::string>& words) {
  const auto check = [=](std::string& text) {
    std::string all;
    for (const std::string& word : words) {
      if (text == word) return std::string();
      all += (all.empty() ? "" : ", ") + word;
    }
    throw BadArgument(option, text, "one of " + all);
  };
  return {check, CLI::detail::join(words, "|"), option};
}

/// Any text but none: an empty value is a slip, mostly a variable that was not set, and never means "as without the option".
inline CLI::Validator not_empty(const std::string& option, const std::string& what) {
  const auto check = [=](std::string& text) {
    if (text.empty()) throw BadArgument(option, text, what);
    return std::string();
  };
  return {check, "", option};
}

/// A file to write. stdout has a meaning of its own, and a file of that name is not meant.
inline CLI::Validator file_to_write(const std::string& option) {
  const auto check = [=](std::string& text) {
    if (text.empty() || text == "-") throw BadArgument(option, text, "the name of a file");
    return std::string();
  };
  return {check, "", option};
}

}  // namespace lean::cli

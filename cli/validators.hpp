// What the values of options must be. A value that is not is answered as every bad argument is, "--option = value: allowed", where
// CLI11's own checks have words, and bounds, of their own.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <string>
#include <type_traits>
#include <vector>

#include "cli/bad_argument.hpp"

namespace lean::cli {

/// A decimal number in [low, high]; for Option::transform(), so that nothing reads the text in another way.
template <typename T>
CLI::Validator in_range(const std::string& option, T low, T high) {
  const auto text_of = [](T value) {
    char text[64];
    return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
  };
  const std::string range = text_of(low) + " to " + text_of(high);
  const auto check = [=](std::string& text) {
    T value{};
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end || !(value >= low && value <= high)) {
      throw BadArgument(option, text, (std::is_integral_v<T> ? "a whole number from " : "a number from ") + range);
    }
    text = text_of(value);
    return std::string();
  };
  return {check, range, option};
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

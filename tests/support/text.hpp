// Splitting text: for case lines and layout names.
#pragma once

#include <string>
#include <vector>

namespace lean::support {

[[nodiscard]] inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

}  // namespace lean::support

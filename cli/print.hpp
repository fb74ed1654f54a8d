// What people see: aligned tables, times and shares in words, a progress line.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lean::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  /// First column to the left, all others to the right; a rule under the header.
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "12.3 us", "4.56 ms": three digits that matter.
[[nodiscard]] std::string time_text(double us);
[[nodiscard]] std::string percent_text(double fraction);

/// An error as a fraction of its bound: two digits that matter, never rounded down to 0.
[[nodiscard]] std::string ratio_text(double ratio);

/// One line on stderr that is written over on a terminal; elsewhere plain lines, not more than one in two seconds.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void say(const std::string& words);
  /// Takes the line away, so that results may be printed.
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_said_{};
};

void print(const std::string& text);
void write_file(const std::string& option, const std::string& path, const std::string& text);

}  // namespace lean::cli

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

/// Onto stdout at once. Throws when that fails: a result that nobody got is no success.
void print(const std::string& text);

/// A file that an option names. Every write opens, closes and is checked; throws BadArgument when one fails.
class OutputFile {
 public:
  OutputFile(std::string option, std::string path) : option_(std::move(option)), path_(std::move(path)) {}

  /// Before work that would be lost: makes an empty file where there is none, and leaves one that is there as it is.
  void check() const { write("", "a"); }
  /// The file holds `text` and nothing else.
  void begin(const std::string& text) const { write(text, "w"); }
  void append(const std::string& text) const { write(text, "a"); }

 private:
  void write(const std::string& text, const char* mode) const;

  std::string option_;
  std::string path_;
};

}  // namespace lean::cli

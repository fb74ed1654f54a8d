// RowProgress: which row of how many a benchmark is at, and when it will be done.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "cli/print.hpp"

namespace lean::cli {

/// "about 40 s left", "about 12 min left", "about 3.5 h left". `done` and `all` are of one unit; empty while nothing is done.
[[nodiscard]] std::string time_left_text(double done, double all, double elapsed_seconds);

class RowProgress {
 public:
  /// What the rows take against each other, in any unit; 0: nothing.
  explicit RowProgress(std::vector<double> costs);

  /// The first row begins, then the one behind it.
  void next();
  /// "3/88, about 4 min left: words".
  void say(const std::string& words);

  [[nodiscard]] Progress& line() { return line_; }

 private:
  Progress line_;
  std::vector<double> costs_;
  double all_ = 0.0;
  double done_ = 0.0;
  std::size_t rows_begun_ = 0;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace lean::cli

// EarlierLines: what an earlier run left in the result file that --resume goes on with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lean::cli {

/// How notes of lines begin that hold no measurement, and that of those which --max-seconds cut off. A later run, which may have
/// more memory or time, decides again.
inline constexpr const char* kSkipped = "skipped: ";
inline constexpr const char* kOutOfTime = "skipped: --max-seconds";

/// What is measured together: all lines of it are there, or it is measured again.
struct LineGroup {
  std::string row;
  std::vector<std::int32_t> lens{};  // rows of one name have other lengths with another --kv-mib or --trace
  std::int32_t threads = 0;          // 0 on a GPU
  std::vector<std::string> impls;
};

class EarlierLines {
 public:
  EarlierLines() = default;
  /// A line that was cut off in the middle, the last, is left out. Throws BadArgument when the file holds something else, or
  /// lines of another device. A file that is not there yet has none.
  EarlierLines(const std::string& path, const std::string& device);

  /// Whether all lines of the group are there. Where some are missing, those that are there are dropped. Throws BadArgument
  /// where the file has the row with other lengths.
  [[nodiscard]] bool has(const LineGroup& group);

  /// What is left of the file.
  [[nodiscard]] std::string text() const;

 private:
  struct Line {
    std::string row;
    std::vector<std::int32_t> lens;
    std::int32_t threads = 0;
    std::string impl;
    std::string text;
  };
  std::string path_;
  std::vector<Line> lines_;
};

}  // namespace lean::cli

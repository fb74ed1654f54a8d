// LineSink: writes each line of a benchmark as it comes, to the result file and to stdout, and keeps it for the summary.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/print.hpp"
#include "cli/problem_json.hpp"

namespace lean::cli {

template <typename TLine>
class LineSink {
 public:
  /// How a line looks in the file and to people.
  struct Forms {
    std::function<Json(const TLine&)> json;
    std::function<std::string(const TLine&)> text;
    std::string text_header;
  };

  /// `path` empty: no file; it begins with `earlier_lines`. `as_json`: JSON lines on stdout, too.
  LineSink(Forms forms, const std::string& path, bool as_json, const std::string& earlier_lines = "")
      : forms_(std::move(forms)), as_json_(as_json) {
    if (!path.empty()) file_.emplace("--out", path).begin(earlier_lines);
    if (!as_json_) print(forms_.text_header);
  }

  void add(TLine line, Progress& progress) {
    const std::string json_line = line_of(forms_.json(line));
    progress.clear();
    print(as_json_ ? json_line : forms_.text(line));
    if (file_) file_->append(json_line);
    lines_.push_back(std::move(line));
  }

  [[nodiscard]] const std::vector<TLine>& lines() const { return lines_; }

 private:
  Forms forms_;
  std::optional<OutputFile> file_;
  bool as_json_;
  std::vector<TLine> lines_;
};

}  // namespace lean::cli

#include "cli/print.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cli/bad_argument.hpp"

namespace lean::cli {

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_[0].size());
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < rows_[r].size(); ++c) {
      line += c == 0 ? fmt::format("{:<{}}", rows_[r][c], widths[c]) : fmt::format("  {:>{}}", rows_[r][c], widths[c]);
    }
    text += line + '\n';
    if (r == 0) text += std::string(line.size(), '-') + '\n';
  }
  return text;
}

std::string time_text(double us) {
  const char* unit = us < 1e3 ? "us" : (us < 1e6 ? "ms" : "s");
  const double value = us < 1e3 ? us : (us < 1e6 ? us / 1e3 : us / 1e6);
  const int decimals = value >= 100.0 ? 0 : (value >= 10.0 ? 1 : 2);
  return fmt::format("{:.{}f} {}", value, decimals, unit);
}

std::string percent_text(double fraction) { return fmt::format("{:.1f} %", fraction * 100.0); }

std::string ratio_text(double ratio) { return std::isfinite(ratio) ? fmt::format("{:.2g}", ratio) : "not finite"; }

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}
Progress::~Progress() { clear(); }

void Progress::say(const std::string& words) {
  constexpr auto kQuiet = std::chrono::seconds(2);
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ && now - last_said_ < kQuiet) return;
  last_said_ = now;
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", words.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (terminal_ && shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::runtime_error(fmt::format("the result could not be written to stdout: {}", std::strerror(errno)));
  }
}

void OutputFile::write(const std::string& text, const char* mode) const {
  errno = 0;
  std::FILE* const file = std::fopen(path_.c_str(), mode);
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (!ok) throw BadArgument(option_, path_, fmt::format("a file that can be written ({})", std::strerror(errno)));
}

}  // namespace lean::cli

#include "cli/row_progress.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

namespace lean::cli {

std::string time_left_text(double done, double all, double elapsed_seconds) {
  if (done <= 0.0) return {};
  const double seconds = elapsed_seconds * (all - done) / done;
  if (seconds < 90.0) return fmt::format("about {:.0f} s left", std::max(std::ceil(seconds / 10.0) * 10.0, 10.0));
  if (seconds < 5400.0) return fmt::format("about {:.0f} min left", seconds / 60.0);
  return fmt::format("about {:.1f} h left", seconds / 3600.0);
}

RowProgress::RowProgress(std::vector<double> costs)
    : costs_(std::move(costs)), all_(std::accumulate(costs_.begin(), costs_.end(), 0.0)) {}

void RowProgress::next() {
  if (rows_begun_ > 0) done_ += costs_[rows_begun_ - 1];
  ++rows_begun_;
}

void RowProgress::say(const std::string& words) {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  const std::string left = time_left_text(done_, all_, elapsed);
  line_.say(fmt::format("{}/{}{}{}: {}", rows_begun_, costs_.size(), left.empty() ? "" : ", ", left, words));
}

}  // namespace lean::cli

#include "cli/bench_result.hpp"

#include <fmt/format.h>

#include <cmath>

#include "cli/machine.hpp"
#include "cli/noise.hpp"
#include "cli/print.hpp"

namespace lean::cli {
namespace {

void add_measurement(Json& json, const BenchLine& line) {
  if (!line.measured()) {
    for (const char* key : {"us", "us_min", "us_max", "tbps", "ceiling_us", "error_ratio"}) json[key] = nullptr;
    return;
  }
  add_times(json, line.call);
  json["tbps"] = static_cast<double>(line.spec.kv_bytes()) / line.call.median() / 1e6;
  json["ceiling_us"] = line.ceiling.median();
  json["ceiling_us_min"] = line.ceiling.min();
  json["ceiling_us_max"] = line.ceiling.max();
  json["read_fraction"] = line.read_fraction();
  json["multiply_adds"] = line.spec.products();
  json["compute_us"] = line.compute_us;
  json["roofline_us"] = line.roofline_us();
  json["bound"] = line.compute_bound() ? "compute" : "read";
  json["rounds"] = line.call.us.size();
  json["error_ratio"] = line.verdict.error_ratio;
  json["rows_checked"] = line.verdict.rows_checked;
}

/// Fractions of one kind: how many, their geometric mean, the worst and where.
struct Fractions {
  int count = 0;
  double log_sum = 0.0;
  double worst = INFINITY;
  std::string worst_row;

  void add(double fraction, const BenchLine& line) {
    ++count;
    log_sum += std::log(fraction);
    if (fraction >= worst) return;
    worst = fraction;
    worst_row = fmt::format("{}, {} threads", line.row, line.threads);
  }
  [[nodiscard]] std::string text(const char* what) const {
    if (count == 0) return {};
    return fmt::format("{}: {} rows, geometric mean {}, worst {} ({})\n", what, count, percent_text(std::exp(log_sum / count)),
                       percent_text(worst), worst_row);
  }
};

/// Slower beyond the spread: even its best round was slower than the other's worst.
bool loses(const BenchLine& line, const BenchLine& rival) { return line.call.min() > rival.call.max(); }

}  // namespace

std::string BenchLine::noise() const { return measured() ? noise_in(call, ceiling) : std::string(); }

Json to_json(const BenchLine& line, const BenchContext& context) {
  Json json{{"row", line.row}, {"suite", name_of(line.suite)}, {"impl", line.impl}};
  add_problem(json, line.spec);
  json["threads"] = line.threads;
  json["kv_bytes"] = line.spec.kv_bytes();
  add_measurement(json, line);
  json["device"] = context.device;
  json["driver"] = "";
  json["sm_clock_mhz"] = nullptr;
  json["isa"] = line.isa.empty() ? context.isa : line.isa;
  json["executor"] = context.executor;
  json["last_level_cache_bytes"] = context.last_level_cache_bytes;
  json["commit"] = context.commit;
  json["date"] = utc_now();
  json["note"] = line.note.empty() ? Json(nullptr) : Json(line.note);
  return json;
}

std::string text_header() {
  return fmt::format("{:<60} {:>2}  {:<18} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9}  {:<7} {:>7}\n", "row", "t", "impl", "time", "min",
                     "max", "GB/s", "of read", "roofline", "bound", "error");
}

std::string to_text(const BenchLine& line) {
  const std::string head = fmt::format("{:<60} {:>2}  {:<18}", line.row, line.threads, line.impl);
  if (!line.measured()) return fmt::format("{} {}\n", head, line.note);
  return fmt::format("{} {:>9} {:>9} {:>9} {:>8.2f} {:>8} {:>9}  {:<7} {:>7}{}\n", head, time_text(line.call.median()),
                     time_text(line.call.min()), time_text(line.call.max()),
                     static_cast<double>(line.spec.kv_bytes()) / line.call.median() / 1e3, percent_text(line.read_fraction()),
                     percent_text(line.roofline_fraction()), line.compute_bound() ? "compute" : "read",
                     ratio_text(line.verdict.error_ratio), line.note.empty() ? "" : "  " + line.note);
}

std::string summary_text(const std::vector<BenchLine>& lines) {
  Fractions read_bound;
  Fractions compute_bound;
  std::string lost;
  int not_measured = 0;
  int noisy = 0;
  for (const BenchLine& line : lines) {
    if (!line.measured()) {
      ++not_measured;
    } else if (!line.noise().empty()) {
      ++noisy;
    } else if (line.impl == "lean") {
      if (line.compute_bound()) {
        compute_bound.add(line.roofline_fraction(), line);
      } else {
        read_bound.add(line.read_fraction(), line);
      }
      for (const BenchLine& rival : lines) {
        if (rival.row != line.row || rival.threads != line.threads || !rival.measured() || !loses(line, rival)) continue;
        lost += fmt::format("slower than {}: {}, {} threads, {} against {}\n", rival.impl, line.row, line.threads,
                            time_text(line.call.median()), time_text(rival.call.median()));
      }
    }
  }
  std::string text =
      read_bound.text("read-bound, share of the read ceiling") + compute_bound.text("compute-bound, share of the roofline");
  if (not_measured > 0) text += fmt::format("not measured: {} lines\n", not_measured);
  if (noisy > 0)
    text += fmt::format("noisy: {} lines, in none of these figures; leave the machine alone and measure them again\n", noisy);
  return text + lost;
}

}  // namespace lean::cli

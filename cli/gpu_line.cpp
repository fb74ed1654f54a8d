#include "cli/gpu_line.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/machine.hpp"
#include "cli/print.hpp"

namespace lean::cli {
namespace {

constexpr double kCeilingsAgree = 0.03;

/// Factors of one kind: how many, their geometric mean, the largest and where.
struct Factors {
  int count = 0;
  double log_sum = 0.0;
  double worst = 0.0;
  std::string worst_row;

  void add(double factor, const std::string& row) {
    ++count;
    log_sum += std::log(factor);
    if (factor <= worst) return;
    worst = factor;
    worst_row = row;
  }
  [[nodiscard]] double mean() const { return std::exp(log_sum / count); }
  [[nodiscard]] std::string text(const std::string& what) const {
    if (count == 0) return {};
    return fmt::format("{}: {} rows, geometric mean {:.3f}, worst {:.2f} ({})\n", what, count, mean(), worst, worst_row);
  }
};

void add_measurement(Json& json, const GpuLine& line) {
  if (!line.measured()) {
    for (const char* key : {"us", "us_min", "us_max", "us_isolated", "tbps", "ceiling_us", "error_ratio"}) json[key] = nullptr;
    return;
  }
  add_times(json, line.call.chained);
  json["us_isolated"] = line.call.isolated.median();
  json["tbps"] = static_cast<double>(line.spec.kv_bytes()) / line.us() / 1e6;
  json["ceiling_us"] = line.ceiling_us();
  json["ceiling_us_min"] = line.ceiling.chained.min();
  json["ceiling_us_max"] = line.ceiling.chained.max();
  json["ceiling_us_isolated"] = line.ceiling.isolated.median();
  json["ceiling_kernel"] = line.ceiling_kernel;
  json["read_fraction"] = line.read_fraction();
  json["target_us"] = line.target_us();
  json["rounds"] = line.call.chained.us.size();
  json["chain_calls"] = line.call.chain_calls;
  json["copies"] = line.copies;
  json["workers"] = line.work.workers;
  json["worker_tiles"] = line.work.tiles;
  json["worker_segments"] = line.work.segments;
  json["contributors"] = line.work.contributors;
  json["tile_bytes"] = line.work.tile_bytes;
  json["error_ratio"] = line.verdict.error_ratio;
  json["rows_checked"] = line.verdict.rows_checked;
}

void add_peer(Json& json, const GpuLine& line, const GpuContext& context) {
  if (!line.peer) return;
  json["peer"] = line.peer->impl;
  json["peer_us"] = line.peer->us;
  json["peer_ceiling_us"] = line.peer->ceiling_us;
  json["peer_device"] = context.peers_device;
  if (line.measured()) json["against_peer"] = line.against_peer();
}

Json number_or_null(double number) { return number > 0.0 ? Json(number) : Json(nullptr); }

/// Slower beyond the spread: even its best round was slower than the other's worst.
bool loses(const GpuLine& line, const GpuLine& rival) { return line.call.chained.min() > rival.call.chained.max(); }

/// Rows of `lean` that were slower than one of its rivals.
std::string lost_text(const std::vector<GpuLine>& lines) {
  std::string text;
  for (const GpuLine& line : lines) {
    if (line.impl != "lean" || !line.measured()) continue;
    for (const GpuLine& rival : lines) {
      if (rival.row != line.row || !rival.measured() || !loses(line, rival)) continue;
      text += fmt::format("slower than {}: {}, {} against {}\n", rival.impl, line.row, time_text(line.us()), time_text(rival.us()));
    }
  }
  return text;
}

/// The slowest of the rows that differ in the number of outputs only / the fastest.
std::string flatness_text(const std::vector<GpuLine>& lines) {
  const GpuLine* fastest = nullptr;
  const GpuLine* slowest = nullptr;
  int count = 0;
  for (const GpuLine& line : lines) {
    if (line.impl != "lean" || !line.measured() || !line.row.starts_with(kFlatnessPrefix)) continue;
    ++count;
    if (fastest == nullptr || line.us() < fastest->us()) fastest = &line;
    if (slowest == nullptr || line.us() > slowest->us()) slowest = &line;
  }
  if (count < 2) return {};
  return fmt::format("flatness over {} rows of equal bytes: longest / shortest time {:.3f} ({} / {})\n", count,
                     slowest->us() / fastest->us(), slowest->row, fastest->row);
}

}  // namespace

double GpuLine::target_us() const {
  const double bytes = static_cast<double>(spec.kv_bytes());
  double target = 5.5;
  if (bytes >= 1e9) {
    target = ceiling_us() / 0.97;
  } else if (bytes >= 256e6) {
    target = ceiling_us() / 0.94;
  } else if (bytes >= 64e6) {
    target = ceiling_us() / 0.88;
  } else if (bytes > 4.2e6) {
    target = ceiling_us() + 2.5;
  }
  const bool strided = spec.layout == Layout::kBshd || spec.layout == Layout::kShd;
  return strided ? std::max(target, ceiling_us() / 0.92) : target;
}

double GpuLine::against_peer() const {
  const double of_times = us() / peer->us;
  if (peer->ceiling_us <= 0.0 || std::abs(peer->ceiling_us / ceiling_us() - 1.0) <= kCeilingsAgree) return of_times;
  return of_times * peer->ceiling_us / ceiling_us();
}

Json to_json(const GpuLine& line, const GpuContext& context) {
  Json json{{"row", line.row}, {"suite", name_of(line.suite)}};
  add_tier(json, line.tier);
  json["impl"] = line.impl;
  add_problem(json, line.spec);
  json["kv_bytes"] = line.spec.kv_bytes();
  add_measurement(json, line);
  add_peer(json, line, context);
  json["device"] = context.device;
  json["driver"] = context.driver;
  json["sm_clock_mhz"] = number_or_null(line.state_after.sm_clock_mhz);
  json["sm_clock_mhz_before"] = number_or_null(line.state_before.sm_clock_mhz);
  json["memory_clock_mhz"] = number_or_null(line.state_after.memory_clock_mhz);
  json["power_watts"] = number_or_null(line.state_after.power_watts);
  json["throttle_reasons"] = fmt::format("{:#x}", line.state_after.throttle_reasons);
  json["commit"] = context.commit;
  json["date"] = utc_now();
  json["note"] = line.note.empty() ? Json(nullptr) : Json(line.note);
  return json;
}

std::string gpu_text_header(bool with_peers) {
  return fmt::format("{:<60} {:<18} {:>8} {:>8} {:>8} {:>8} {:>6} {:>7} {:>8} {:>7}{}\n", "row", "impl", "time", "min", "max",
                     "alone", "TB/s", "of read", "target", "error", with_peers ? "   time / best peer" : "");
}

std::string to_text(const GpuLine& line) {
  const std::string head = fmt::format("{:<60} {:<18}", line.row, line.impl);
  if (!line.measured()) return fmt::format("{} {}\n", head, line.note);
  std::string text =
      fmt::format("{} {:>8} {:>8} {:>8} {:>8} {:>6.3f} {:>7} {:>8} {:>7}", head, time_text(line.us()),
                  time_text(line.call.chained.min()), time_text(line.call.chained.max()), time_text(line.call.isolated.median()),
                  static_cast<double>(line.spec.kv_bytes()) / line.us() / 1e6, percent_text(line.read_fraction()),
                  line.us() <= line.target_us() ? "met" : time_text(line.target_us()), ratio_text(line.verdict.error_ratio));
  if (line.peer) text += fmt::format("   {:.3f} ({} {})", line.against_peer(), time_text(line.peer->us), line.peer->impl);
  return text + (line.note.empty() ? "" : "  " + line.note) + "\n";
}

std::string summary_text(const std::vector<GpuLine>& lines) {
  Factors of_ceiling;
  Factors peers_of_ceiling;
  Factors of_peers;
  std::string slower;
  int not_measured = 0;
  int targets_met = 0;
  for (const GpuLine& line : lines) {
    if (!line.measured()) ++not_measured;
    if (!line.measured() || line.impl != "lean") continue;
    of_ceiling.add(1.0 / line.read_fraction(), line.row);
    if (line.us() <= line.target_us()) ++targets_met;
    if (!line.peer) continue;
    of_peers.add(line.against_peer(), line.row);
    if (line.peer->ceiling_us > 0.0) peers_of_ceiling.add(line.peer->us / line.peer->ceiling_us, line.row);
    if (line.against_peer() > 1.0) {
      slower += fmt::format("slower than the best peer: {}, {:.3f} x {} of {}\n", line.row, line.against_peer(),
                            time_text(line.peer->us), line.peer->impl);
    }
  }
  std::string text = of_ceiling.text("lean, time / read ceiling");
  text += peers_of_ceiling.text("best peer of each row, time / read ceiling");
  text += of_peers.text("lean / best peer");
  if (of_ceiling.count > 0) text += fmt::format("targets met: {} of {} rows\n", targets_met, of_ceiling.count);
  text += flatness_text(lines);
  if (not_measured > 0) text += fmt::format("not measured: {} lines\n", not_measured);
  return text + slower + lost_text(lines);
}

}  // namespace lean::cli

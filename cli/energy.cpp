#include "cli/energy.hpp"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <thread>

namespace lean::cli {
namespace {

struct Reading {
  double seconds = 0.0;
  double joules = 0.0;
};

Reading read(const EnergyMeter& meter, const EnergyClock& clock) {
  const std::optional<double> joules = meter.joules();
  if (!joules) throw std::runtime_error(fmt::format("the energy counter ({}) could not be read", meter.name));
  return {clock.now_seconds(), *joules};
}

/// What has passed between two readings.
Reading moved(const EnergyMeter& meter, const Reading& from, const Reading& to) {
  const Reading passed{to.seconds - from.seconds, to.joules - from.joules};
  if (passed.joules > 0.0) return passed;
  throw std::runtime_error(fmt::format("the energy counter ({}) did not move in {:.1f} s", meter.name, passed.seconds));
}

std::optional<double> number_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  double number = 0.0;
  if (stream >> number) return number;
  return std::nullopt;
}

/// One package's counter, which begins anew behind its range.
class RaplPackage {
 public:
  explicit RaplPackage(const std::filesystem::path& folder)
      : file_(folder / "energy_uj"), range_(number_in(folder / "max_energy_range_uj").value_or(0.0)), last_(number_in(file_)) {}

  [[nodiscard]] bool readable() const { return last_.has_value(); }
  [[nodiscard]] const std::filesystem::path& file() const { return file_; }

  [[nodiscard]] std::optional<double> joules() {
    const std::optional<double> now = number_in(file_);
    if (!now) return now;
    if (*now < *last_) begun_anew_ += range_;
    last_ = now;
    return (*now + begun_anew_) / 1e6;
  }

 private:
  std::filesystem::path file_;
  double range_;
  double begun_anew_ = 0.0;
  std::optional<double> last_;
};

}  // namespace

EnergyMeter rapl_meter(const std::string& powercap) {
  const auto packages = std::make_shared<std::vector<RaplPackage>>();
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(powercap, none)) {
    // intel-rapl:0 is a package (AMD's too), intel-rapl:0:0 a part of it.
    const std::string name = entry.path().filename();
    if (!name.starts_with("intel-rapl:") || name.find(':') != name.rfind(':')) continue;
    RaplPackage package(entry.path());
    if (!package.readable()) throw std::runtime_error("no energy counter: " + package.file().string() + " cannot be read");
    packages->push_back(std::move(package));
  }
  if (packages->empty()) throw std::runtime_error("no energy counter: " + powercap + " has no intel-rapl:0");
  return {.name = "RAPL", .joules = [packages]() -> std::optional<double> {
            double sum = 0.0;
            for (RaplPackage& package : *packages) {
              const std::optional<double> joules = package.joules();
              if (!joules) return std::nullopt;
              sum += *joules;
            }
            return sum;
          }};
}

EnergyClock steady_energy_clock() {
  return {.now_seconds = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); },
          .sleep = [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }};
}

double idle_watts(const EnergyMeter& meter, const EnergyPlan& plan, const EnergyClock& clock) {
  clock.sleep(plan.settle_seconds);
  const Reading begin = read(meter, clock);
  clock.sleep(plan.idle_seconds);
  const Reading passed = moved(meter, begin, read(meter, clock));
  return passed.joules / passed.seconds;
}

Energy measure_energy(const EnergyMeter& meter, double idle_watts, const std::function<std::int64_t(double)>& work,
                      const EnergyPlan& plan, const EnergyClock& clock) {
  Energy energy;
  double joules = 0.0;
  (void)work(plan.settle_seconds);
  for (int window = 0; window < plan.windows; ++window) {
    const Reading begin = read(meter, clock);
    std::int64_t calls = 0;
    for (double left = plan.window_seconds; left > 0.0; left = plan.window_seconds - (clock.now_seconds() - begin.seconds)) {
      calls += work(left);
    }
    const Reading passed = moved(meter, begin, read(meter, clock));
    const double net = passed.joules - idle_watts * passed.seconds;
    if (!(net > 0.0)) {
      throw std::runtime_error(fmt::format("the energy counter ({}) moved by {:.1f} W under load and by {:.1f} W idle", meter.name,
                                           passed.joules / passed.seconds, idle_watts));
    }
    energy.joules_per_call.us.push_back(net / static_cast<double>(calls));
    energy.us_per_call.us.push_back(passed.seconds * 1e6 / static_cast<double>(calls));
    energy.calls += calls;
    energy.seconds += passed.seconds;
    joules += passed.joules;
  }
  energy.watts = joules / energy.seconds;
  return energy;
}

}  // namespace lean::cli

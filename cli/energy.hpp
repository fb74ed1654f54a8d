// Energy of a call: windows of calls back to back, between two readings of an energy counter, less what the machine takes when it is
// idle. The counter is a GPU's (NVML) or that of a machine's processors (RAPL); `lean bench --energy` reports.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/measure.hpp"

namespace lean::cli {

/// A counter of joules since some moment.
struct EnergyMeter {
  std::string name;                               // as result lines say it
  std::function<std::optional<double>()> joules;  // nothing: it cannot be read now
};

/// Of all processor packages: RAPL, as Linux shows it in /sys/class/powercap. Its counters begin anew at a number that they name;
/// windows are far shorter than that takes. Throws std::runtime_error, which says why, where none can be read.
[[nodiscard]] EnergyMeter rapl_meter(const std::string& powercap = "/sys/class/powercap");

/// How time passes; tests have their own.
struct EnergyClock {
  std::function<double()> now_seconds;
  std::function<void(double seconds)> sleep;
};
[[nodiscard]] EnergyClock steady_energy_clock();

struct EnergyPlan {
  int windows = 3;
  double window_seconds = 10.0;  // at least
  double idle_seconds = 10.0;
  double settle_seconds = 2.0;  // after work, before idleness is measured; and of work before the first window
};

/// Watts of the idle machine. Throws std::runtime_error where the counter is not readable or did not move.
[[nodiscard]] double idle_watts(const EnergyMeter& meter, const EnergyPlan& plan, const EnergyClock& clock);

struct Energy {
  Samples joules_per_call;  // of each window, idle power subtracted; Samples' numbers are joules here
  Samples us_per_call;
  double watts = 0.0;  // of all windows, idle power included
  std::int64_t calls = 0;
  double seconds = 0.0;
};

/// `work(seconds)` makes calls back to back for about so long, waits for them, and returns how many they were. Throws
/// std::runtime_error where the counter is not readable, did not move, or moved no faster than when idle: there is no number then.
[[nodiscard]] Energy measure_energy(const EnergyMeter& meter, double idle_watts, const std::function<std::int64_t(double)>& work,
                                    const EnergyPlan& plan, const EnergyClock& clock);

}  // namespace lean::cli

// Energy of a call: windows, idle power subtracted, and no number from a counter that does not tell one. On a made-up machine, whose
// counter is read through a made-up libnvidia-ml.so.1, and whose seconds pass at once.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "cli/energy.hpp"
#include "cli/nvml.hpp"

namespace lean::cli {
namespace {

/// The library that a Nvml opens by its name: this one, once it is loaded.
class FakeNvml {
 public:
  FakeNvml() : file_(dlopen(LEAN_FAKE_NVML, RTLD_NOW | RTLD_LOCAL)) {
    if (file_ == nullptr) throw std::runtime_error(dlerror());
    energy_mj = static_cast<unsigned long long*>(dlsym(file_, "fake_energy_mj"));
    result = static_cast<int*>(dlsym(file_, "fake_energy_result"));
    *energy_mj = 0;
    *result = 0;
  }
  ~FakeNvml() { (void)dlclose(file_); }
  FakeNvml(const FakeNvml&) = delete;
  FakeNvml& operator=(const FakeNvml&) = delete;

  unsigned long long* energy_mj;
  int* result;

 private:
  void* file_;
};

constexpr double kIdleWatts = 100.0;
constexpr double kCallWatts = 600.0;
constexpr double kCallSeconds = 0.002;

/// Takes kIdleWatts when it sleeps and kCallWatts when it calls.
class Machine {
 public:
  [[nodiscard]] EnergyMeter meter() {
    return {.name = "NVML", .joules = [this] { return nvml_.joules(); }};
  }
  [[nodiscard]] EnergyClock clock() {
    return {.now_seconds = [this] { return seconds_; }, .sleep = [this](double seconds) { pass(seconds, kIdleWatts); }};
  }
  /// Not more than a second of calls at a time, as a chain of graphs has a most.
  [[nodiscard]] std::function<std::int64_t(double)> work() {
    return [this](double seconds) {
      const auto calls = static_cast<std::int64_t>(std::ceil(std::min(seconds, 1.0) / kCallSeconds));
      pass(static_cast<double>(calls) * kCallSeconds, work_watts);
      return calls;
    };
  }
  double work_watts = kCallWatts;
  bool counter_moves = true;
  FakeNvml library;

 private:
  void pass(double seconds, double watts) {
    seconds_ += seconds;
    joules_ += seconds * watts;
    if (counter_moves) *library.energy_mj = static_cast<unsigned long long>(std::llround(joules_ * 1e3));
  }

  Nvml nvml_{"0000:01:00.0"};
  double seconds_ = 0.0;
  double joules_ = 0.0;
};

std::string what_is_thrown(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(Energy, IsTheCounterOfEachWindowLessIdlePowerByItsCalls) {
  Machine machine;
  const EnergyPlan plan;
  const double idle = idle_watts(machine.meter(), plan, machine.clock());
  EXPECT_NEAR(idle, kIdleWatts, 0.01);
  const Energy energy = measure_energy(machine.meter(), idle, machine.work(), plan, machine.clock());
  ASSERT_EQ(energy.joules_per_call.us.size(), 3U);
  for (const double joules : energy.joules_per_call.us) EXPECT_NEAR(joules, (kCallWatts - kIdleWatts) * kCallSeconds, 1e-6);
  EXPECT_NEAR(energy.us_per_call.median(), kCallSeconds * 1e6, 1e-6);
  EXPECT_NEAR(energy.watts, kCallWatts, 0.01);
  EXPECT_GE(energy.seconds, 3 * plan.window_seconds - 1e-9);
  EXPECT_NEAR(static_cast<double>(energy.calls) * kCallSeconds, energy.seconds, 1e-9);
}

TEST(Energy, AWindowLastsAsLongAsItIsAskedToHoweverShortARunOfCallsIs) {
  Machine machine;
  const EnergyPlan plan{.windows = 2, .window_seconds = 7.5};
  const Energy energy = measure_energy(machine.meter(), 0.0, machine.work(), plan, machine.clock());
  EXPECT_GE(energy.seconds, 15.0 - 1e-9);
  EXPECT_LT(energy.seconds, 15.1);
  EXPECT_NEAR(energy.joules_per_call.median(), kCallWatts * kCallSeconds, 1e-6);
}

TEST(Energy, ACounterThatDoesNotMoveGivesNoNumber) {
  Machine machine;
  const EnergyPlan plan;
  machine.counter_moves = false;
  EXPECT_EQ(what_is_thrown([&] { (void)idle_watts(machine.meter(), plan, machine.clock()); }),
            "the energy counter (NVML) did not move in 10.0 s");
  EXPECT_EQ(what_is_thrown([&] { (void)measure_energy(machine.meter(), 0.0, machine.work(), plan, machine.clock()); }),
            "the energy counter (NVML) did not move in 10.0 s");
}

TEST(Energy, WorkThatTakesNoMoreThanIdlenessGivesNoNumber) {
  Machine machine;
  machine.work_watts = kIdleWatts - 1.0;
  EXPECT_EQ(what_is_thrown([&] { (void)measure_energy(machine.meter(), kIdleWatts, machine.work(), {}, machine.clock()); }),
            "the energy counter (NVML) moved by 99.0 W under load and by 100.0 W idle");
}

TEST(Energy, ACounterThatIsNotThereGivesNoNumber) {
  Machine machine;
  *machine.library.result = 3;
  EXPECT_EQ(what_is_thrown([&] { (void)idle_watts(machine.meter(), {}, machine.clock()); }),
            "the energy counter (NVML) could not be read");
  EXPECT_FALSE(Nvml("no such bus").joules().has_value());
}

/// A folder like /sys/class/powercap.
class Powercap {
 public:
  Powercap() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lean-powercap-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path = pattern;
  }
  ~Powercap() { std::filesystem::remove_all(path); }
  Powercap(const Powercap&) = delete;
  Powercap& operator=(const Powercap&) = delete;

  void set(const std::string& domain, const std::string& file, long long number) const {
    std::filesystem::create_directories(path / domain);
    std::ofstream(path / domain / file) << number << '\n';
  }

  std::filesystem::path path;
};

TEST(Energy, RaplIsTheSumOfAllPackagesAndGoesOnBehindItsRange) {
  const Powercap powercap;
  for (const char* package : {"intel-rapl:0", "intel-rapl:1"}) powercap.set(package, "max_energy_range_uj", 10'000'000);
  powercap.set("intel-rapl:0", "energy_uj", 9'000'000);
  powercap.set("intel-rapl:1", "energy_uj", 2'000'000);
  powercap.set("intel-rapl:0:0", "energy_uj", 5'000'000);  // the cores, which their package counts too
  const EnergyMeter meter = rapl_meter(powercap.path.string());
  EXPECT_DOUBLE_EQ(meter.joules().value(), 11.0);
  powercap.set("intel-rapl:0", "energy_uj", 1'000'000);  // behind its range
  EXPECT_DOUBLE_EQ(meter.joules().value(), 13.0);
  powercap.set("intel-rapl:0", "energy_uj", 4'000'000);
  EXPECT_DOUBLE_EQ(meter.joules().value(), 16.0);
}

TEST(Energy, AMachineWithoutRaplSaysSo) {
  const Powercap powercap;
  EXPECT_EQ(what_is_thrown([&] { (void)rapl_meter(powercap.path.string()); }),
            "no energy counter: " + powercap.path.string() + " has no intel-rapl:0");
  std::filesystem::create_directories(powercap.path / "intel-rapl:0");
  EXPECT_EQ(what_is_thrown([&] { (void)rapl_meter(powercap.path.string()); }),
            "no energy counter: " + (powercap.path / "intel-rapl:0" / "energy_uj").string() + " cannot be read");
}

}  // namespace
}  // namespace lean::cli

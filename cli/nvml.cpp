#include "cli/nvml.hpp"

#include <dlfcn.h>

namespace lean::cli {

// Names, types and numbers are those of nvml.h, which a machine that builds this need not have.
struct Nvml::Library {
  using Handle = void*;
  using Result = int;  // 0: success

  static constexpr int kClockSm = 1;
  static constexpr int kClockMemory = 2;

  void* file = nullptr;
  Handle device = nullptr;
  Result (*init)() = nullptr;
  Result (*shutdown)() = nullptr;
  Result (*handle_by_bus_id)(const char*, Handle*) = nullptr;
  Result (*driver_version)(char*, unsigned) = nullptr;
  Result (*clock)(Handle, int, unsigned*) = nullptr;
  Result (*power)(Handle, unsigned*) = nullptr;
  Result (*throttle_reasons)(Handle, unsigned long long*) = nullptr;
  Result (*energy)(Handle, unsigned long long*) = nullptr;  // mJ; from Volta on

  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (device != nullptr) (void)shutdown();
    if (file != nullptr) (void)dlclose(file);
  }

  template <typename TFunction>
  bool find(TFunction*& function, const char* name) const {
    function = reinterpret_cast<TFunction*>(dlsym(file, name));
    return function != nullptr;
  }

  bool open(const std::string& pci_bus_id) {
    file = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (file != nullptr) (void)find(energy, "nvmlDeviceGetTotalEnergyConsumption");
    return file != nullptr && find(init, "nvmlInit_v2") && find(shutdown, "nvmlShutdown") &&
           find(handle_by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2") && find(driver_version, "nvmlSystemGetDriverVersion") &&
           find(clock, "nvmlDeviceGetClockInfo") && find(power, "nvmlDeviceGetPowerUsage") &&
           find(throttle_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons") && init() == 0 &&
           handle_by_bus_id(pci_bus_id.c_str(), &device) == 0;
  }
};

Nvml::Nvml(const std::string& pci_bus_id) : library_(std::make_unique<Library>()) {
  if (!library_->open(pci_bus_id)) library_ = nullptr;
}

Nvml::~Nvml() = default;

GpuState Nvml::state() const {
  GpuState state;
  if (library_ == nullptr) return state;
  unsigned value = 0;
  unsigned long long reasons = 0;
  if (library_->clock(library_->device, Library::kClockSm, &value) == 0) state.sm_clock_mhz = static_cast<std::int32_t>(value);
  if (library_->clock(library_->device, Library::kClockMemory, &value) == 0) {
    state.memory_clock_mhz = static_cast<std::int32_t>(value);
  }
  if (library_->power(library_->device, &value) == 0) state.power_watts = static_cast<double>(value) / 1e3;
  if (library_->throttle_reasons(library_->device, &reasons) == 0) state.throttle_reasons = reasons;
  return state;
}

std::string Nvml::driver() const {
  char text[96] = {};
  return library_ != nullptr && library_->driver_version(text, sizeof(text)) == 0 ? text : "";
}

std::optional<double> Nvml::joules() const {
  unsigned long long millijoules = 0;
  if (library_ == nullptr || library_->energy == nullptr || library_->energy(library_->device, &millijoules) != 0) return {};
  return static_cast<double>(millijoules) / 1e3;
}

}  // namespace lean::cli

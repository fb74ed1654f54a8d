// libnvidia-ml.so.1 without a GPU, for energy_test.cpp: the functions that cli/nvml.cpp asks for, by their names in nvml.h. The counter
// is what the test has set.
extern "C" {

unsigned long long fake_energy_mj = 0;
int fake_energy_result = 0;  // of nvmlDeviceGetTotalEnergyConsumption; 3: not supported

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  *device = &fake_energy_mj;
  return bus_id[0] == '0' ? 0 : 6;  // not found
}
int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  if (length < 5) return 7;
  const char driver[] = "fake";
  for (int i = 0; i < 5; ++i) text[i] = driver[i];
  return 0;
}
int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) { return *mhz = 1000, 0; }
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) { return *milliwatts = 500'000, 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) { return *reasons = 0, 0; }
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  *millijoules = fake_energy_mj;
  return fake_energy_result;
}
}

"""What a machine says of itself beside a measurement: clocks, power, throttling and energy of a GPU by NVML, energy of a CPU by RAPL.

Both are read through what drivers and the kernel bring; nothing has to be installed. A meter that is not there is None with a reason.
"""
import ctypes
import pathlib
import time

#: nvmlDeviceGetCurrentClocksEventReasons: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLES = {0x4: "power cap", 0x8: "slowdown", 0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake"}
SM, MEMORY = 1, 2  # nvmlClockType_t
MOST_CLOCK_CHANGE = 0.03  # a clock that moved by more voids a row


class NoMeter(Exception):
    """The text says why there is none."""


class Nvml:
    """One GPU by its PCI bus id, as "0000:3b:00.0"; any bus id where it is empty: the first GPU."""

    def __init__(self, bus_id: str, library=None):
        try:
            self.library = library or ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NoMeter(f"no NVML: {error}") from error
        self.handle = ctypes.c_void_p()
        self.ask("nvmlInit_v2")
        if bus_id:
            self.ask("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self.handle))
        else:
            self.ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))

    def ask(self, function: str, *arguments) -> None:
        status = getattr(self.library, function)(*arguments)
        if status:
            raise NoMeter(f"{function}: status {status}")

    def number(self, function: str, *arguments, kind=ctypes.c_uint) -> int:
        value = kind()
        self.ask(function, self.handle, *arguments, ctypes.byref(value))
        return value.value

    def driver(self) -> str:
        text = ctypes.create_string_buffer(80)
        self.ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(80))
        return text.value.decode()

    def joules(self) -> float:
        return self.number("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong) / 1e3

    def state(self) -> dict:
        """Clocks in MHz, power in W, what slows the GPU; a number that this GPU does not give is left out."""
        found = {}
        for name, function, *arguments in (("sm_clock_mhz", "nvmlDeviceGetClockInfo", SM), ("mem_clock_mhz", "nvmlDeviceGetClockInfo", MEMORY),
                                           ("power_w", "nvmlDeviceGetPowerUsage")):
            try:
                found[name] = self.number(function, *arguments)
            except NoMeter:
                continue
        if "power_w" in found:
            found["power_w"] /= 1e3
        try:
            reasons = self.number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
            found["throttle"] = ", ".join(text for bit, text in THROTTLES.items() if reasons & bit)
        except NoMeter:
            pass
        return found


class Rapl:
    """The energy of all CPU packages, which the kernel counts in microjoules up to a number and begins again."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/sys/class/powercap")):
        self.counters = [folder for folder in sorted(root.glob("intel-rapl:*")) if folder.name.count(":") == 1]
        try:
            self.ranges = [int((folder / "max_energy_range_uj").read_text()) for folder in self.counters]
            self.last = self.read()
        except OSError as error:
            raise NoMeter(f"no RAPL: {error}") from error
        if not self.counters:
            raise NoMeter(f"no RAPL: {root} has no intel-rapl")
        self.total_uj = 0

    def read(self) -> list:
        return [int((folder / "energy_uj").read_text()) for folder in self.counters]

    def joules(self) -> float:
        """Since the meter was made; it must be asked more often than the counters begin again, which is minutes."""
        now = self.read()
        self.total_uj += sum((new - old) % span for new, old, span in zip(now, self.last, self.ranges))
        self.last = now
        return self.total_uj / 1e6


def clock_note(before: dict, after: dict) -> str | None:
    """Why a row's times are void; None: its clocks stood still."""
    for name in ("sm_clock_mhz", "mem_clock_mhz"):
        first, last = before.get(name), after.get(name)
        if first and last and abs(last - first) > MOST_CLOCK_CHANGE * first:
            return f"void: {name} moved from {first} to {last}"
    return None


def watts(meter, seconds: float) -> float:
    """Of a machine that does nothing else. NoMeter: the counter stood still."""
    begin, started = meter.joules(), time.perf_counter()
    time.sleep(seconds)
    return moved(meter, begin) / (time.perf_counter() - started)


def moved(meter, begin: float) -> float:
    """Joules since a reading."""
    joules = meter.joules() - begin
    if not joules > 0:
        raise NoMeter("the energy counter did not move")
    return joules


def energy(meter, turn, calls: int, kv_bytes: int, seconds: float, windows: int = 3, idle_w: float = 0.0) -> dict:
    """J a call and nJ a byte of K and V above idle, the median of windows of so many seconds, in the fields of `lean bench --energy`.
    `turn()` runs `calls` calls to their end. NoMeter: the counter stood still, or moved no faster than idle."""
    found, powers = [], []
    for _ in range(windows):
        turns, begin, started = 0, meter.joules(), time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            turn()
            turns += 1
        elapsed = time.perf_counter() - started
        joules = moved(meter, begin)
        if not joules > idle_w * elapsed:
            raise NoMeter(f"the energy counter moved by {joules / elapsed:.1f} W under load and by {idle_w:.1f} W idle")
        powers.append(joules / elapsed)
        found.append((joules - idle_w * elapsed) / (turns * calls))
    found.sort()
    median = found[windows // 2]
    return {"joules_per_call": median, "joules_per_call_min": found[0], "joules_per_call_max": found[-1],
            "nj_per_kv_byte": median / kv_bytes * 1e9, "watts": sorted(powers)[windows // 2], "idle_watts": idle_w, "energy_window_s": seconds}

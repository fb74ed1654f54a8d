"""How busy one call keeps a GPU under each schedule, by Nsight Compute's counters: multiprocessors, memory, L2, warps.

    python3 bench/utilisation.py --lean build-cuda/bin/lean --out FILE.jsonl

Runs `lean run --backend cuda` of each row under each schedule below `ncu`, which has to be on the path, and profiles one launch of its
kernel. The clocks are left as they are (`--clock-control none`); the caches are flushed before the launch, as ncu does by default, and
the kernel runs alone: so `us` is not the time of a call in a chain, which `lean bench` measures. Shares are of the whole duration of
the kernel and of the hardware's peak, as ncu defines them (`pct_of_peak_sustained_elapsed`), divided by 100.

Exit code: 0 ok, 1 a row could not be profiled (its line has a note), 2 bad arguments.
"""
import argparse
import csv
import io
import json
import pathlib
import shutil
import subprocess
import sys
from datetime import datetime, timezone

from option_lists import list_of

#: name: (lengths, query heads, kv heads, head dim, type), the values of `lean run`.
ROWS = {
    "R1 128k+63x1k": ("128k,63x1k", 32, 8, 128, "bf16"),
    "P13 6x48x64k": ("6x64k", 48, 48, 64, "fp16"),
    "L8B 34x16k": ("34x16k", 32, 8, 128, "bf16"),
    "70B/8 1x128k": ("128k", 8, 1, 128, "bf16"),
}
SCHEDULES = ("lean", "fixed-split", "data-parallel")
#: field of a line: (the counter of ncu, what one of the field is of it); multiprocessors is divided by the last.
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e3),
    "multiprocessors": ("sm__cycles_active.avg", 1.0),
    "compute": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 100.0),
    "memory": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 100.0),
    "l2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 100.0),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active", 100.0),
    "read_bytes": ("dram__bytes_read.sum", 1.0),
    "elapsed_cycles": ("sm__cycles_elapsed.avg", 1.0),
}
KERNELS = "regex:^(decode_kernel|plain_kernel)$"


def profile(lean: pathlib.Path, row: str, schedule: str) -> dict:
    """The counters of one launch. RuntimeError: what ncu or the command said."""
    lens, q_heads, kv_heads, head_dim, dtype = ROWS[row]
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--kernel-name", KERNELS, "--launch-count",
               "1", "--metrics", ",".join(counter for counter, _ in COUNTERS.values()), str(lean), "run", "--backend", "cuda", "--lens", lens,
               "--q-heads", str(q_heads), "--kv-heads", str(kv_heads), "--head-dim", str(head_dim), "--dtype", dtype, "--schedule", schedule,
               "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    table = "\n".join(line for line in done.stdout.splitlines() if line.startswith('"'))
    lines = list(csv.DictReader(io.StringIO(table)))
    if done.returncode or len(lines) != 2:  # the second line is the launch, the first has the units
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-400:]}")
    launch = lines[1]
    values = {field: float(launch[counter].replace(",", "")) / one for field, (counter, one) in COUNTERS.items()}
    values["multiprocessors"] /= values.pop("elapsed_cycles")
    values = {field: value if field in ("us", "read_bytes") else round(value, 4) for field, value in values.items()}
    return {"kernel": launch["Kernel Name"].split("<")[0].split("(")[0].removeprefix("void ").split("::")[-1],
            "ctas": launch.get("Grid Size", ""), **values}


def device() -> dict:
    """The first GPU's name and driver, as nvidia-smi has them."""
    found = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    return dict(zip(("device", "driver"), found.stdout.splitlines()[0].strip().split(", ")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lean", type=pathlib.Path, default=pathlib.Path("build-cuda/bin/lean"), help="the command, built with LEAN_CUDA")
    parser.add_argument("--rows", default=list(ROWS), type=list_of(known=ROWS), help="some of them, with commas between them")
    parser.add_argument("--commit", default="", help="to record in the lines")
    parser.add_argument("--out", type=pathlib.Path, help="a file of JSON lines to append to; none: only print")
    options = parser.parse_args()
    if not shutil.which("ncu"):
        parser.error("ncu (Nsight Compute) is not on the path")
    if not options.lean.is_file():
        parser.error(f"--lean: {options.lean} is no file")
    gpu, failed = device(), False
    for row in options.rows:
        for schedule in SCHEDULES:
            line = {"row": row, "impl": "lean" if schedule == "lean" else f"lean/{schedule.replace('-', '_')}", "profiler": "ncu",
                    **gpu, "commit": options.commit, "date": datetime.now(timezone.utc).date().isoformat(), "note": None}
            try:
                line.update(profile(options.lean, row, schedule))
            except RuntimeError as error:
                line["note"], failed = str(error), True
            print(json.dumps(line), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

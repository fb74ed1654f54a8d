"""What a GPU's own counters say of a call under each schedule: tables of `lean bench --energy --out` and of bench/utilisation.py.

Needs nothing but Python. bench/figure_data.py takes the committed files from here.
"""

SCHEDULES = ("lean", "fixed_split", "data_parallel")


def by_schedule(lines: list) -> dict:
    """row: {schedule: line}, of lines that were measured."""
    rows: dict = {}
    for line in lines:
        if not line["note"]:
            rows.setdefault(line["row"], {})[line["impl"].removeprefix("lean/")] = line
    return rows


def energy_table(lines: list, name_of) -> tuple:
    """Head and rows: millijoules of a call above an idle GPU, its time, and what the GPU draws meanwhile, idle power included."""
    head = ["row", *(f"{schedule}, {unit}" for unit in ("mJ", "us", "W") for schedule in SCHEDULES), "fixed_split / lean, energy"]
    table = []
    for row, of in by_schedule(lines).items():
        joules = [1e3 * of[schedule]["joules_per_call"] for schedule in SCHEDULES]
        table.append([name_of(row.removeprefix("energy ")), *(f"{x:.4g}" for x in joules), *(f"{of[schedule]['call_us']:.4g}" for schedule in SCHEDULES),
                      *(f"{of[schedule]['watts']:.0f}" for schedule in SCHEDULES), f"{joules[1] / joules[0]:.2f}"])
    return head, table


def utilisation_table(lines: list, name_of) -> tuple:
    """Head and rows: shares of a launch's duration, in percent."""
    shares = {"multiprocessors": "multiprocessors busy", "memory": "memory", "l2": "L2", "compute": "arithmetic"}
    head = ["row", "schedule", "us", *shares.values()]
    return head, [[name_of(row), schedule, f"{of[schedule]['us']:.4g}", *(f"{100 * of[schedule][field]:.0f} %" for field in shares)]
                  for row, of in by_schedule(lines).items() for schedule in SCHEDULES]


def energy_ratios(lines: list, over: str) -> list:
    """Energy of a call under a schedule over that of lean, a row each."""
    return [of[over]["joules_per_call"] / of["lean"]["joules_per_call"] for of in by_schedule(lines).values()]

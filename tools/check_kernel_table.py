#!/usr/bin/env python3
"""Checks the table of variants in docs/cuda-backend.md against the code's, and that every measurement it names is kept.

Usage: check_kernel_table.py REPOSITORY_ROOT KERNEL_TABLE [--write]; KERNEL_TABLE is the program made of tools/kernel_table.cpp.
--write puts the table into the document. Exits non-zero where the two differ or a file is missing.
"""
import pathlib
import re
import subprocess
import sys

BEGIN = "<!-- kernel table: begin. tools/check_kernel_table.py writes and checks it. -->\n"
END = "<!-- kernel table: end -->"


def main() -> int:
    root, program = pathlib.Path(sys.argv[1]), sys.argv[2]
    document = root / "docs" / "cuda-backend.md"
    table = subprocess.run([program, "--markdown"], check=True, text=True, stdout=subprocess.PIPE).stdout
    before, begin, rest = document.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    if not begin or not end:
        print(f"check_kernel_table: {document} has no place for it")
        return 2
    if "--write" in sys.argv:
        document.write_text(before + begin + table + end + after)
        shown = table
    missing = [name for name in re.findall(r"`(bench/results/[^`]+)`", table) if not (root / name).is_file()]
    for name in missing:
        print(f"{name}: a row is justified by it, and it is not there")
    if shown != table:
        print(f"{document.relative_to(root)} shows another table: check_kernel_table.py {root} {program} --write")
    return 1 if missing or shown != table or "bench/results/" not in table else 0


if __name__ == "__main__":
    sys.exit(main())

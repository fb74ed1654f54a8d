#!/usr/bin/env python3
"""Checks who may include whom: the rooms of src/ know only the rooms to their left, as do the stages of the CUDA kernel, include/lean
knows nobody, integrations/ and python/src know the public interface, integrations/runtime and what lies beside them.

Usage: check_includes.py [REPOSITORY_ROOT]; prints every breach as file:line and exits non-zero if there is one.
"""
import pathlib
import re
import sys

# Room -> rooms it may include, itself aside. docs/contracts.md draws it.
ROOMS = {
    "base": set(),
    "timeline": {"base"},
    "problem": {"base"},
    "schedule": {"base", "problem"},
    "softmax": {"base"},
    "tile": {"base", "problem", "schedule", "softmax"},
    "fixup": {"base", "problem", "schedule", "softmax", "tile"},
    "output": {"base", "problem", "schedule", "softmax", "tile", "fixup"},
}
ALL_ROOMS = set(ROOMS)
ROOMS["backends/reference"] = ALL_ROOMS - {"schedule", "tile", "fixup", "timeline"}  # the oracle must not share what it checks
ROOMS["backends/cpu"] = ALL_ROOMS
ROOMS["backends/cuda"] = ALL_ROOMS
ROOMS["explain"] = {"base", "problem", "schedule"}  # shows schedules to people; nothing that computes knows it
ROOMS["acceptance"] = ALL_ROOMS | {"backends/reference", "backends/cpu", "backends/cuda"}  # what tests hold backends against
ROOMS["api"] = ALL_ROOMS | {"backends/cpu", "backends/cuda", "explain"}

# The stages of the CUDA kernel, each of which may include those before it. What a merge ends in goes to the output straight from
# registers, so the fix-up comes last. docs/contracts.md draws it.
KERNEL = "backends/cuda/kernel/"
STAGES = ["plan", "load", "tile", "output", "fixup"]
WHOLE_KERNEL = {"decode_kernel.cuh", "instantiate.cuh", "wide_consumer.cuh"}  # include every stage; the headers beside them none

# Third-party and threading headers, and the rooms that may use them.
SPECIAL = {
    r"hwy/": {"backends/cpu"},
    r"(omp|immintrin|arm_neon)\.h": {"backends/cpu"},
    r"sys/": {"backends/cpu"},
    r"(thread|mutex|condition_variable|barrier|latch|semaphore)": {"backends/reference", "backends/cpu", "api"},
    r"atomic": {"base", "fixup", "backends/reference", "backends/cpu", "backends/cuda", "api"},
    r"cuda|cub/|thrust/": {"base", "fixup", "backends/cuda"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>|(\w+))')
STANDARD = re.compile(r"[a-z0-9_]+(\.h)?")


def room_of(path: str) -> str:
    """The room a path relative to src/ lies in: its folder, or backends/<name>."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "backends" else parts[0]


def breach_in_room(room: str, quoted: str, system: str) -> str:
    """Why a file of `room` may not have this include; empty if it may."""
    for pattern, rooms in SPECIAL.items():
        if re.match(pattern, quoted or system):
            return "" if room in rooms else f"only {', '.join(sorted(rooms))} may include it"
    if quoted.startswith("lean/"):
        return ""
    if quoted:
        target = room_of(quoted)
        if target not in ROOMS:
            return "not a room of src/: write \"room/file.hpp\""
        return "" if target == room or target in ROOMS[room] else f"{room} must not know {target}"
    return "" if STANDARD.fullmatch(system) else "a third-party header"


def breach_in_kernel(file: str, quoted: str) -> str:
    """Why a file of src/ (a path) may not include this by the order of the kernel's stages; empty if it may."""
    if not quoted.startswith(KERNEL):
        return ""
    if file.startswith("backends/cuda/ptx/"):
        return "ptx must not know the kernel"
    *folder, name = quoted.removeprefix(KERNEL).split("/")
    if folder and folder[0] not in STAGES:
        return f"{folder[0]} is not a stage of the kernel"
    if not file.startswith(KERNEL):
        return ""
    *own_folder, own_name = file.removeprefix(KERNEL).split("/")
    if own_folder and own_folder[0] not in STAGES:
        return f"{own_folder[0]} is not a stage of the kernel"
    if not own_folder:
        return f"what every stage may include must not know {folder[0]}" if folder and own_name not in WHOLE_KERNEL else ""
    if not folder:
        return f"a stage must not know {name}" if name in WHOLE_KERNEL else ""
    return "" if STAGES.index(folder[0]) <= STAGES.index(own_folder[0]) else f"{own_folder[0]} must not know {folder[0]}"


def breach_in_public(quoted: str, system: str) -> str:
    if quoted:
        return "" if quoted.startswith("lean/") else "a public header includes only \"lean/...\" and the standard library"
    return "" if STANDARD.fullmatch(system) else "a third-party header in the public interface"


def breach_in_binding(quoted: str, system: str) -> str:
    """An embedding is a user like any other: the library's public headers, what all embeddings share, and its own."""
    allowed = quoted.startswith(("lean/", "integrations/runtime/")) or "/" not in quoted
    return "" if allowed else "only \"lean/...\", \"integrations/runtime/...\" and files beside it"


def breaches(root: pathlib.Path):
    """Yields (place, include, reason), and counts nothing itself."""
    folders = (("include/lean", None, breach_in_public), ("integrations", None, breach_in_binding),
               ("python/src", None, breach_in_binding), ("src", room_of, None))
    for folder, room_rule, flat_rule in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".hpp", ".h", ".cpp", ".cu", ".cuh"}:
                continue
            file = path.relative_to(root / folder).as_posix()
            room = room_rule(file) if room_rule else None
            if room is not None and room not in ROOMS:
                yield path.relative_to(root), "", f"{room} is not a room"
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if not match or match[3]:  # an include through a macro: Highway's re-inclusion
                    continue
                quoted, system = match[1] or "", match[2] or ""
                if room is None:
                    reason = flat_rule(quoted, system)
                else:
                    reason = breach_in_room(room, quoted, system) or breach_in_kernel(file, quoted)
                if reason:
                    yield f"{path.relative_to(root)}:{number}", quoted or system, reason


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    if not (root / "src").is_dir():
        print(f"check_includes: {root} has no src/")
        return 2
    found = list(breaches(root))
    for place, include, reason in found:
        print(f"{place}: {include}: {reason}")
    print(f"check_includes: {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

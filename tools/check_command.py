#!/usr/bin/env python3
"""Checks that docs/reference/command.md is what `lean COMMAND --help` prints, and that docs/cli.md explains the options that there are
and no others; --write makes the reference so.

Usage: check_command.py REPOSITORY_ROOT LEAN [--write]; LEAN is the command that was built. Exits non-zero where the two differ.
"""
import pathlib
import re
import subprocess
import sys

HEAD = """# Command reference

What `lean COMMAND --help` prints. [The command](../cli.md) explains it.

<!-- tools/check_command.py writes and checks this page. -->
"""


def help_of(program: str, *command: str) -> str:
    return subprocess.run([program, *command, "--help"], check=True, text=True, stdout=subprocess.PIPE).stdout


def page(program: str) -> str:
    whole = help_of(program)
    commands = re.findall(r"^  (\w+)", whole.partition("Subcommands:")[2], re.M)
    if not commands:
        raise SystemExit(f"check_command: {program} --help names no subcommand")
    parts = [("lean", whole), *((f"lean {name}", help_of(program, name)) for name in commands)]
    return HEAD + "".join(f"\n## {name}\n\n```text\n{_tidy(text)}\n```\n" for name, text in parts)


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.strip().splitlines()))


def main() -> int:
    root, program = pathlib.Path(sys.argv[1]), sys.argv[2]
    document = root / "docs" / "reference" / "command.md"
    now = page(program)
    if "--write" in sys.argv:
        document.write_text(now)
    if not document.is_file() or document.read_text() != now:
        print(f"{document.relative_to(root)} is not what {program} prints: check_command.py {root} {program} --write")
        return 1
    explained, there = (set(re.findall(r"--[a-z][\w-]*", text)) for text in ((root / "docs" / "cli.md").read_text(), now))
    for option in sorted(explained ^ there):
        print(f"docs/cli.md: {option} " + ("is no option of the command" if option in explained else "is not explained"))
    return 1 if explained != there or len(there) < 20 else 0


if __name__ == "__main__":
    sys.exit(main())

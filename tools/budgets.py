#!/usr/bin/env python3
"""Measures the sources against the budgets of CONTRIBUTING.md: prints what is over them, and how deep headers include each other.

Files of 400 lines, functions of 60, lines of code of 132 columns (.clang-format's), which tables between clang-format's marks may pass.
Budgets are a smell test and no law, so nothing fails; run over two checkouts, the last line of each compares them.

Usage: budgets.py [REPOSITORY_ROOT] [--list]
"""
import argparse
import ast
import pathlib
import re

FOLDERS = ("include", "src", "cli", "integrations", "python/src", "python/lean_attention")
C_LIKE = (".h", ".hpp", ".cpp", ".cu", ".cuh")
FILE_LINES, FUNCTION_LINES, COLUMNS = 400, 60, 132
NO_FUNCTION = re.compile(r"\b(?:namespace|struct|class|enum|union|extern)\b|^\s*(?:if|for|while|switch|else|do|case|return)\b|=\s*\{$")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def functions_of_c(lines: list[str]):
    """(line, length) of each function's body, by clang-format's layout: it ends at the first brace as far in as it begins."""
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if indent > 4 or not line.endswith("{") or NO_FUNCTION.search(line):
            continue
        end = next((j for j in range(i + 1, len(lines)) if re.match(rf" {{{indent}}}\}}", lines[j])), i)
        yield i + 1, end - i + 1


def functions_of_python(text: str):
    """(line, length) of each function, its docstring aside."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            shown = ast.get_docstring(node, clean=False)
            yield node.lineno, node.end_lineno - node.lineno + 1 - (shown.count("\n") + 1 if shown else 0)


def long_lines(lines: list[str]):
    """Numbers of lines of code over the limit, outside tables that clang-format leaves alone."""
    off = False
    for number, line in enumerate(lines, 1):
        off = "clang-format off" in line or (off and "clang-format on" not in line)
        if not off and len(line) > COLUMNS:
            yield number


def depth_of(path: str, includes: dict[str, list[str]], known: dict[str, int]) -> int:
    """Headers on the longest way from a file of src/ down, itself included."""
    if path not in known:
        known[path] = 0  # what includes itself in a circle counts once
        known[path] = 1 + max((depth_of(each, includes, known) for each in includes.get(path, ())), default=0)
    return known[path]


def include_depths(root: pathlib.Path) -> dict[str, int]:
    """Path in src/ or include/ -> depth."""
    files = ((root / base, file) for base in ("src", "include") for file in (root / base).rglob("*") if file.suffix in C_LIKE)
    texts = {file.relative_to(base).as_posix(): file.read_text() for base, file in files}
    includes = {path: [each for each in INCLUDE.findall(text) if each in texts] for path, text in texts.items()}
    known: dict[str, int] = {}
    return {path: depth_of(path, includes, known) for path in includes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", default=".", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="name each place")
    options = parser.parse_args()
    over: dict[str, list[str]] = {"files": [], "functions": [], "lines": []}
    count = 0
    for file in sorted(f for folder in FOLDERS for f in (options.root / folder).rglob("*") if f.suffix in (*C_LIKE, ".py")):
        name, text = file.relative_to(options.root).as_posix(), file.read_text()
        lines, count = text.splitlines(), count + 1
        functions = functions_of_python(text) if file.suffix == ".py" else functions_of_c(lines)
        over["files"] += [f"{name}: {len(lines)} lines"] if len(lines) > FILE_LINES else []
        over["functions"] += [f"{name}:{line}: {length} lines" for line, length in functions if length > FUNCTION_LINES]
        over["lines"] += [f"{name}:{number}" for number in long_lines(lines)]
    for places in over.values() if options.list else ():
        print("\n".join(places))
    depths = include_depths(options.root)
    deepest = max(depths, key=depths.get)
    print(
        f"{count} files: {len(over['files'])} of more than {FILE_LINES} lines, {len(over['functions'])} functions of more than {FUNCTION_LINES}, "
        f"{len(over['lines'])} lines of more than {COLUMNS} columns; headers {depths[deepest]} deep from {deepest}"
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks the documents against the tree, so that what they say stays true.

- A code block under `<!-- code: FILE -->` must be the file, or what stands between its two `[example]` lines.
- Every relative link of every *.md must lead to a file, and its #anchor to a heading there.
- Every `path` in backticks that begins with a folder of the tree must exist; of `path:name`, the file must define the name:
  as a function, type, field, constant, macro, enumerator, target or Python name. A use or a comment does not count.
- Every test written as `Suite.Name` must be a test of the tree.

Usage: check_readme.py [REPOSITORY_ROOT]; prints every fault as file:line and exits non-zero if there is one.
"""
import itertools
import pathlib
import re
import sys

FOLDERS = ("include", "src", "cli", "tests", "tools", "bench", "examples", "cmake", "docs", "python", "integrations")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"((?:" + "|".join(FOLDERS) + r")/[\w./-]*\w)(?::(\w+)(?:\(\))?)?")
TEST_NAME = re.compile(r"[A-Z]\w*\.[A-Z]\w*")
TEST = re.compile(r"\bTEST(?:_F|_P)?\((\w+),\s*(\w+)\)")
TYPED_TEST = re.compile(r"\bTYPED_TEST(?:_P)?\((\w+),\s*(\w+)\)")
SOURCES = (".c", ".h", ".cpp", ".hpp", ".cu", ".cuh")
NOT_CODE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)
ENUMERATION = re.compile(r"\benum (?:class )?\w*[^{;()]*\{([^}]*)\}")
# What stands ahead of a name that is declared: attributes, and the words of a type, at most qualified (`auto Class::name(`).
TYPE = r"(?:\[\[\w+\]\]\s*|(?:alignas|__launch_bounds__)\([^()]*\)\s*|[\w:]+(?:<[^()=;]*>)?(?:::\w+)*[\s*&]+)+(?:\w+(?:<\w+>)?::)*"
DEFINED = (
    r"#\s*define {name}\b|\b(?:struct|class|enum|union|concept|using|namespace)\s+(?:class\s+)?{name}\b"
    r"|(?:^|[{{;])[ \t]*(?!return|else|case|throw|new|delete|goto|co_)" + TYPE + r"{name}\s*(?:[({{;\[]|=[^=])"
)
SHOWN = re.compile(r"<!-- code: (\S+) -->")
MARKER = "[example]"


def documents(root: pathlib.Path) -> list:
    """The documents at the top and below docs/, bench/ and examples/."""
    below = (root / folder for folder in ("docs", "bench", "examples"))
    return sorted(itertools.chain(root.glob("*.md"), *(folder.rglob("*.md") for folder in below)))


def lines_outside_blocks(text: str):
    """Yields (number, line) of prose, code blocks left out."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(text: str) -> set:
    """The anchors that GitHub gives the headings of a document."""
    found = set()
    for _, line in lines_outside_blocks(text):
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(words.replace(" ", "-"))
    return found


def example_of(text: str) -> str:
    """What a document shows of a file: all of it, or the lines between two that hold the marker."""
    lines = text.splitlines()
    marked = [i for i, line in enumerate(lines) if MARKER in line]
    return "\n".join(lines[marked[0] + 1 : marked[1]] if len(marked) == 2 else lines).strip("\n")


def code_faults(root: pathlib.Path, text: str):
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        shown = SHOWN.search(line)
        if not shown:
            continue
        source = root / shown[1]
        rest = lines[number:]
        if not source.is_file() or len(rest) < 2 or not rest[0].startswith("```"):
            yield number, f"{shown[1]}: no such file, or no code block on the next line"
            continue
        block = "\n".join(itertools.takewhile(lambda l: not l.startswith("```"), rest[1:])).strip("\n")
        if block != example_of(source.read_text()):
            yield number, f"the code block differs from {shown[1]}"


def link_faults(document: pathlib.Path, text: str):
    for number, line in lines_outside_blocks(text):
        for target in LINK.findall(CODE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            if not file.exists():
                yield number, f"{target}: no such file"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                yield number, f"{target}: no such heading"


def defines(suffix: str, text: str, name: str) -> bool:
    """Whether a file, of this suffix and text, defines or declares a name; a use of it, a comment or a string does not count."""
    if suffix == ".py":
        return bool(re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|^\s*{name}(?:: [^=\n]+)? =", text, re.M))
    if suffix not in SOURCES:
        return bool(re.search(rf"^\s*(?:function\(|macro\(|add_\w+\(|set\(|option\()?{name}\b", text, re.M))
    text = NOT_CODE.sub(" ", text)
    enumerators = (body for body in ENUMERATION.findall(text) if re.search(rf"\b{name}\b", body))
    return bool(re.search(DEFINED.format(name=name), text, re.M)) or any(enumerators)


def name_faults(root: pathlib.Path, text: str, tests: set):
    for number, line in lines_outside_blocks(text):
        for code in CODE.findall(line):
            path = PATH.fullmatch(code)
            if path:
                file = root / path[1]
                if not file.exists():
                    yield number, f"{path[1]}: no such file"
                elif path[2] and not defines(file.suffix, file.read_text(), path[2]):
                    yield number, f"{path[1]} does not define {path[2]}"
            elif TEST_NAME.fullmatch(code) and code not in tests:
                yield number, f"{code}: no such test"


def tests_of(root: pathlib.Path) -> set:
    text = "\n".join(file.read_text() for file in sorted((root / "tests").rglob("*.cpp")))
    return {f"{suite}.{name}" for pattern in (TEST, TYPED_TEST) for suite, name in pattern.findall(text)}


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    files = documents(root)
    tests = tests_of(root)
    faults = shown = 0
    for document in files:
        text = document.read_text()
        shown += len(SHOWN.findall(text))
        found = itertools.chain(code_faults(root, text), link_faults(document, text), name_faults(root, text, tests))
        for number, fault in sorted(found):
            faults += 1
            print(f"{document.relative_to(root)}:{number}: {fault}")
    if not shown or not tests:
        print(f"check_readme: {len(files)} documents under {root} show no code, or there are no tests to name")
        return 2
    print(f"check_readme: {len(files)} documents, {shown} code blocks of files, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

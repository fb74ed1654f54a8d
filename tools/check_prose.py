#!/usr/bin/env python3
"""Checks that the prose of every *.md is wrapped at 120 columns; --write wraps the paragraphs that are not.

No line of a paragraph begins with the mark of a number: that would end the paragraph. Tables, headings, code blocks and lines of
HTML are left alone. Targets of links, and the marks around numbers and tables that
bench/figures.py writes, do not count: a reader does not see them.

Usage: check_prose.py [REPOSITORY_ROOT] [--write]; prints every fault as file:line and exits non-zero if there is one.
"""
import pathlib
import re
import sys

from check_readme import documents

COLUMNS = 120
UNSEEN = re.compile(r"<!--.*?-->|(?<=\])\([^)\s]*\)")
# What is never broken: code, a link, a word, and a marked number with the word before it, since a line that begins with a comment
# would end the paragraph.
TOKEN = re.compile(r"(?:`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<!--.*?-->|\S| (?=<!--))+")
ITEM = re.compile(r"(\s*)([-*+]|\d+\.)(\s+)")
QUOTE = re.compile(r"> ?")
STARTS_SOMETHING = re.compile(r"[-+*#>|=]+$|\d+[.)]$|#|>|\|")
NO_PROSE = re.compile(r"\s*(?:\||#|<(?!!--=)|\[[^\]]+\]:|:::|!!!|---$)")


def width(line: str) -> int:
    return len(UNSEEN.sub("", line))


def paragraphs(lines: list):
    """Yields (begin, end) of the lines of each paragraph and list item of prose."""
    fenced, begin = False, None
    for number, line in enumerate([*lines, ""]):
        fence = line.lstrip().startswith("```")
        prose = not (fenced or fence or not line.strip() or NO_PROSE.match(line))
        if begin is not None and (not prose or ITEM.match(line)):
            yield begin, number
            begin = None
        if prose and begin is None:
            begin = number
        fenced ^= fence


def wrapped(lines: list) -> list:
    """The lines of one paragraph, none wider than what cannot be broken."""
    lead = ITEM.match(lines[0]) or QUOTE.match(lines[0]) or re.match(r"\s*", lines[0])
    first, quoted = lead[0], lines[0].startswith(">")
    rest = first if quoted else " " * len(first)
    found, line = [], first
    for token in TOKEN.findall(" ".join([lines[0][len(first):], *(QUOTE.sub("", each, 1) if quoted else each.strip() for each in lines[1:])])):
        empty = not line.strip() or line == first
        longer = line + token if empty else f"{line} {token}"
        if empty or width(longer) <= COLUMNS or STARTS_SOMETHING.match(token):
            line = longer
        else:
            found.append(line)
            line = rest + token
    return [*found, line]


def main() -> int:
    arguments = [each for each in sys.argv[1:] if each != "--write"]
    root = pathlib.Path(arguments[0] if arguments else ".").resolve()
    files, faults, checked = documents(root), 0, 0
    for document in files:
        text = document.read_text()
        lines = text.splitlines()
        for begin, end in reversed([*paragraphs(lines)]):
            checked += 1
            now = wrapped(lines[begin:end])
            long = [begin + i for i, line in enumerate(lines[begin:end]) if width(line) > COLUMNS or line.lstrip().startswith("<!--")]
            if not long or now == lines[begin:end]:
                continue  # within the width, or nothing can be broken
            if "--write" in sys.argv:
                lines[begin:end] = now
                continue
            faults += len(long)
            for number in long:
                print(f"{document.relative_to(root)}:{number + 1}: {width(lines[number])} columns of {COLUMNS}, or it begins with a comment")
        if "--write" in sys.argv and lines != text.splitlines():
            document.write_text("\n".join(lines) + "\n")
    print(f"check_prose: {len(files)} documents, {checked} paragraphs, {faults} faults" + (": run tools/check_prose.py --write" if faults else ""))
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())

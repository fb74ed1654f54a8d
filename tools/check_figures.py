#!/usr/bin/env python3
"""Fails when a figure, a table or a marked number of the documents is not what the result files say.

Makes the data anew from bench/results and compares them: each figure's data with docs/figures/NAME.json, and their digest with the one
that both its drawings hold; each table and number with what stands in the document. No pixel is compared, and nothing is drawn, so
this needs nothing but Python. `bench/figures.py` mends what it finds.

Usage: check_figures.py [REPOSITORY_ROOT]
"""
import importlib
import pathlib
import re
import sys

OPENED = re.compile(r"<!-- table: (?!end)|<!--= ")


def figure_faults(data, figures):
    for name in data.FIGURES:
        text = data.figure_data(name)
        file = figures.OUT / f"{name}.json"
        if not file.is_file() or file.read_text() != text:
            yield f"docs/figures/{name}.json is not what the results say"
        for mode in figures.COLOURS:
            drawn = figures.OUT / f"{name}-{mode}.svg"
            if not drawn.is_file() or f"<dc:description>{figures.digest(text)}</dc:description>" not in drawn.read_text():
                yield f"docs/figures/{drawn.name} shows other data"
    known = {f"{name}{end}" for name in data.FIGURES for end in (".json", *(f"-{mode}.svg" for mode in figures.COLOURS))}
    for file in sorted(figures.OUT.iterdir()):
        if file.name not in known:
            yield f"docs/figures/{file.name} is nobody's figure"


def document_faults(figures, root: pathlib.Path, shown: list):
    for document in figures.documents():
        text, name = document.read_text(), document.relative_to(root)
        marks = [found[2] for pattern in (figures.TABLE, figures.NUMBER) for found in pattern.finditer(text)]
        shown += marks + re.findall(r"figures/([\w-]+)-light\.svg", text)
        if len(marks) != len(OPENED.findall(text)):
            yield f"{name}: a table or a number has no end"
        try:
            now = figures.with_tables(text)
        except KeyError as error:
            yield f"{name}: nobody makes {error}"
            continue
        for number, (old, new) in enumerate(zip(text.splitlines(), now.splitlines()), 1):
            if old != new:
                yield f"{name}:{number}: the results say {new.strip()[:150]}"
                break
        else:
            if now != text:
                yield f"{name}: a table has other rows"


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root / "bench"))
    data, figures = importlib.import_module("figure_data"), importlib.import_module("figures")
    shown: list = []
    faults = [*figure_faults(data, figures), *document_faults(figures, root, shown)]
    faults += [f"{kind} {name} is in no document" for kind, names in (("figure", data.FIGURES), ("table", data.TABLES), ("number", data.NUMBERS))
               for name in names if name not in shown]
    for fault in faults:
        print(fault)
    print(f"check_figures: {len(data.FIGURES)} figures, {len(shown)} places in documents, {len(faults)} faults" + (": run bench/figures.py" if faults else ""))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

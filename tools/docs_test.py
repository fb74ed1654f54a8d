#!/usr/bin/env python3
"""Builds the site of docs/ into build-docs/ and checks it: MkDocs has nothing to warn of, no page asks another host for anything,
and the reference holds every public name, each with a description of itself and of its arguments.

Ends with "N passed, M failed". tools/setup.sh docs has made the environment that it runs in.

Usage: .venv-docs/bin/python tools/docs_test.py
"""
import html.parser
import logging
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE = ROOT / "build-docs"
PAGES_AT_LEAST = 40
#: What a browser fetches without being asked; links that a reader follows are none.
FETCHED = {"script": "src", "img": "src", "source": "srcset", "link": "href", "iframe": "src", "video": "src"}
ELSEWHERE = re.compile(r"(?:https?:)?//")


class Fetched(html.parser.HTMLParser):
    """Collects what a page has fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list = []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        address = given.get(FETCHED.get(tag, ""))
        if address and ELSEWHERE.match(address) and given.get("rel") != "canonical":
            self.elsewhere.append(address)


def build() -> list:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(SITE)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, text=True, env=environment, capture_output=True, check=False)
    if done.returncode:
        return [line for line in (done.stdout + done.stderr).splitlines() if re.match(r"\s*(?:WARNING|ERROR)|\s*Aborted", line)]
    pages = sorted(SITE.rglob("*.html"))
    return [] if len(pages) >= PAGES_AT_LEAST else [f"{len(pages)} pages, {PAGES_AT_LEAST} or more are expected"]


def fetched_elsewhere() -> list:
    faults = []
    for page in SITE.rglob("*.html"):
        found = Fetched()
        found.feed(page.read_text())
        faults += [f"{page.relative_to(SITE)} fetches {address}" for address in found.elsewhere]
    for sheet in SITE.rglob("*.css"):
        faults += [f"{sheet.relative_to(SITE)} fetches {found}" for found in re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']+", sheet.read_text())]
    return faults


def header_names() -> list:
    """Every declaration of the headers that is exported, or may be: by a pattern of its own, not that of the page."""
    faults = []
    for page, headers in (("cpp", ("lean", "problem", "options", "status")), ("c", ("lean",))):
        shown = (SITE / "reference" / f"{page}.html").read_text()
        for header in headers:
            text = (ROOT / "include" / "lean" / f"{header}.{'h' if page == 'c' else 'hpp'}").read_text()
            names = re.findall(r"^(?:struct|enum class) (?:\[\[\w+\]\] )?(\w+)|LEAN_API [\w:&* ]*?(\w+)\(|^\} (\w+);", text, re.M)
            wanted = {name for found in names for name in found if name}
            faults += [f"reference/{page}: {name} of {header} is not there" for name in sorted(wanted) if f'id="{name.lower()}' not in shown and f">{name}</code>" not in shown]
            faults += [f"{header}: no declaration was found"] * (not wanted)
    return faults


def docstring_faults() -> list:
    """Public names of Python that are not on their page; arguments without a word, and words without an argument."""
    import griffe

    logging.disable(logging.CRITICAL)
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    shown = re.findall(r"<!-- python: lean_attention\.(\S+)", page)
    package = griffe.load("lean_attention", search_paths=[ROOT / "python"], extensions=griffe.load_extensions(ROOT / "tools/site/likeness.py"))
    faults = []
    for module in (package, package["compat.flashinfer"], package["distributed"], package["ort"]):
        prefix = module.path.removeprefix("lean_attention").lstrip(".")
        for name in module.exports or []:
            name = str(getattr(name, "name", name))
            if not any(each.rpartition(".")[2] == name and (not prefix or each.startswith(prefix)) for each in shown):
                faults.append(f"reference/python: {module.path}.{name} is not there")
    for name in shown:
        what = package[name]
        what = what.final_target if what.is_alias else what
        functions = [what] if what.is_function else [m for m in what.members.values() if m.is_function and not m.name.startswith("_")]
        for each in dict.fromkeys([what, *functions]):
            if each.docstring is None:
                faults.append(f"{each.path} has no docstring")
            elif each.is_function:
                faults += argument_faults(each)
    faults += [f"reference/python: {name} is there twice" for name in sorted(set(shown)) if shown.count(name) > 1]
    return faults + ["reference/python names nothing"] * (not shown)


def argument_faults(function) -> list:
    """Arguments are described under Args, one entry for one or several; a function of few may name them in its sentences."""
    text = function.docstring.value
    named = {word for found in re.findall(r"^    ?([\w`, \[\]|./*()-]+?):", text, re.M) for word in re.findall(r"\w+", found)}
    words = set(re.findall(r"\w+", text))
    has = [parameter.name.lstrip("*") for parameter in function.parameters if parameter.name not in ("self", "cls")]
    silent = [name for name in has if name not in named and name not in words and name not in ("args", "kwargs", "arguments", "others", "keywords")]
    return [f"{function.path}: its docstring does not say what {', '.join(silent)} is"] if silent else []


CHECKS = (build, fetched_elsewhere, header_names, docstring_faults)


def main() -> int:
    failed = 0
    for check in CHECKS:
        faults = check()
        failed += bool(faults)
        print(f"docs: {check.__name__.replace('_', ' ')}: {'ok' if not faults else f'{len(faults)} faults'}", *faults, sep="\n  ", flush=True)
        if check is build and faults:
            failed = len(CHECKS)  # nothing to look at
            break
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Checks that the recipes of docs/how-to-add.md name every file that they must; that what they name exists, check_readme.py sees to.

A recipe says by what it is measured: under its heading stands `<!-- complete: WORD WORD -->`, the names that follow whoever has done it
last (an enumerator, a constant, an argument). Then
- every source file that holds one of the words, comments, docstrings and #include lines aside, must be named in that recipe;
- every word must stand in some source file, so that a name that was changed does not leave the check empty.
Sources are what lies below the folders of SOURCES; tests are chosen, not complete, so recipes name them freely.
- In a table, the first cell of a row names a file, a test or a document, or is a heading in bold.

Usage: check_recipes.py [REPOSITORY_ROOT]; prints every fault as file:line and exits non-zero if there is one.
"""
import ast
import pathlib
import re
import sys

DOCUMENT = pathlib.Path("docs/how-to-add.md")
SOURCES = ("include", "src", "cli", "python/lean_attention", "python/src", "integrations")
C_LIKE = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh")
HEADING = re.compile(r"^## (.+)$")
MARK = re.compile(r"^<!-- complete: ([\w ]+) -->$")
NAMED = re.compile(r"`((?:include|src|cli|python|integrations)/[\w./-]*\w)(?::\w+)?(?:\(\))?`")
ROW = re.compile(r"^\| *(.*?) *\|")
STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)
INCLUDE = re.compile(r"^\s*#\s*include[^\n]*$", re.M)


class Recipe:
    """A section of the document."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.marks: list[tuple[int, str]] = []  # line, word
        self.files: set[str] = set()


def recipes_of(text: str) -> list[Recipe]:
    """The sections of the document, each with its marks and the files that it names."""
    recipes: list[Recipe] = []
    for number, line in enumerate(text.splitlines(), 1):
        heading, mark = HEADING.match(line), MARK.match(line)
        if heading:
            recipes.append(Recipe(heading[1]))
        elif recipes:
            recipes[-1].marks += [(number, word) for word in mark[1].split()] if mark else []
            recipes[-1].files.update(NAMED.findall(line))
    return recipes


def python_words(text: str) -> set[str]:
    """Identifiers and the words of strings, docstrings aside."""
    tree = ast.parse(text)
    words: set[str] = set()
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                words.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.update(re.findall(r"\w+", node.value))
    return words


def words_of(file: pathlib.Path) -> set[str]:
    """What a source file says beside its comments, and beside what it includes."""
    text = file.read_text()
    if file.suffix in C_LIKE:
        return set(re.findall(r"\w+", INCLUDE.sub("", STRING_OR_COMMENT.sub(lambda found: found[1] or " ", text))))
    return python_words(text)


def sources(root: pathlib.Path) -> dict[str, set[str]]:
    """Path -> words of every source file."""
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*")))
    return {file.relative_to(root).as_posix(): words_of(file) for file in files if file.suffix in (*C_LIKE, ".py")}


def faults_of(recipe: Recipe, words_by_file: dict[str, set[str]]):
    """Yields (line, fault) of a recipe's marks."""
    for number, word in recipe.marks:
        holders = sorted(path for path, words in words_by_file.items() if word in words)
        if not holders:
            yield number, f"{word}: no source file has it"
        for path in holders:
            if path not in recipe.files:
                yield number, f"{path} has {word} and is not named in \"{recipe.title}\""


def row_faults(text: str):
    """Yields (line, fault) of tables of files whose row says of no file."""
    in_files = False
    for number, line in enumerate(text.splitlines(), 1):
        row = ROW.match(line)
        in_files = bool(row) and (in_files or row[1] == "files to touch")
        if in_files and not re.search(r"`[^`]+`|\]\([^)]+\)|^\*\*.+|^files to touch$|^-+$", row[1]):
            yield number, f"a row that names no file: {row[1]}"


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    text = (root / DOCUMENT).read_text()
    recipes = recipes_of(text)
    marked = [recipe for recipe in recipes if recipe.marks]
    if not marked:
        print(f"check_recipes: no recipe of {DOCUMENT} says by what it is complete")
        return 2
    words_by_file = sources(root)
    found = [fault for recipe in marked for fault in faults_of(recipe, words_by_file)]
    found += row_faults(text)
    for number, fault in sorted(found):
        print(f"{DOCUMENT}:{number}: {fault}")
    print(f"check_recipes: {len(marked)} of {len(recipes)} recipes measured on {len(words_by_file)} files, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

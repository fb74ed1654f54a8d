"""What MkDocs does beyond docs/ itself: documents of other folders as pages, the API's pages, and links that lead out of docs/.

MkDocs calls the on_* functions (mkdocs.yml: hooks). Files that a page links to and that are no page (sources, result files) are put
beside the site as text, so that it needs no other host.
"""

import pathlib
import posixpath
import re
import sys

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import headers  # noqa: E402  beside this file

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Documents outside docs/, and the pages they become.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmarks.md",
}
PAGE_OF = {source: page for source, page in OUTSIDE.items()}
SOURCE_OF = {page: source for source, page in OUTSIDE.items()}
LINK = re.compile(r"(\]\(|\bsrc(?:set)?=\")([^)\s\"#:]+)(?=[)#\"])")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.M | re.S)
HEADER = re.compile(r"^<!-- header: (\S+) -->$", re.M)
PYTHON = re.compile(r"^<!-- python: (\S+)((?: \w+)*) -->$", re.M)


def on_files(files: Files, config) -> Files:
    """Adds the documents outside docs/, and every file that a page links to."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    pages = {_source(page.src_uri) for page in files.documentation_pages()}
    linked = set()
    for source in pages:
        text = (ROOT / source).read_text()
        for target in (_target(source, link) for _, link in LINK.findall(FENCE.sub("", text))):
            if target not in pages and not target.startswith("docs/") and (ROOT / target).exists():
                linked.add(target)
    for target in sorted(linked):
        files.append(File.generated(config, _copy_of(target), content=_text_of(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    markdown = HEADER.sub(lambda found: headers.reference(ROOT / found[1]), markdown)
    markdown = PYTHON.sub(lambda found: _directive(found[1], found[2].split()), markdown)
    source = _source(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match) -> str:
        target = _target(source, found[2])
        if target in PAGE_OF:
            uri = PAGE_OF[target]
        elif target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            uri = _copy_of(target)
        else:
            return found[0]  # MkDocs warns
        return found[1] + posixpath.relpath(uri, here or ".")

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def _source(page: str) -> str:
    """Where a page's text lies in the repository."""
    return SOURCE_OF.get(page, f"docs/{page}")


def _target(source: str, link: str) -> str:
    """What a relative link of a document leads to, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _copy_of(target: str) -> str:
    return f"tree/{target}.txt"


def _text_of(path: pathlib.Path) -> str:
    """A file's text; of a folder, what lies in it."""
    if path.is_dir():
        return "".join(f"{file.relative_to(path)}\n" for file in sorted(path.rglob("*")) if file.is_file())
    return path.read_text()


def _directive(name: str, members: list) -> str:
    """mkdocstrings' directive for a name of the Python package; with members, of those only."""
    lines = [f"::: {name}", "    options:", f"      members: [{', '.join(members)}]"]
    if members:
        lines += ["      show_root_heading: false", "      show_root_toc_entry: false"]
    return "\n".join(lines) if members else lines[0]

"""The reference of a public header, as markdown: each declaration under its name, with its comment as prose and its code as it stands.

A declaration without a comment is an error, but for those that a comment of several covers (a blank line ends what it covers).
"""

import pathlib
import re
import textwrap

COMMENT = re.compile(r"\s*(?:///?|/\*|\*)")
NAME = re.compile(
    r"(?:struct|enum(?: class)?|enum)\s+(?:\[\[\w+\]\]\s+)?(?P<type>\w+)|#define (?P<macro>\w+)|(?P<function>\w+)\s*\(|constexpr [\w:]+ (?P<value>\w+)"
)
LEFT_OUT = re.compile(r"#(?!define LEAN_VERSION)|namespace |extern |\}|#|struct \w+;")  # of a name that another header declares, too


def reference(header: pathlib.Path) -> str:
    """Markdown of one header."""
    lines = header.read_text().splitlines()
    story, rest = _comment(lines, 0)
    out = [f"## {header.name}", "", _prose(story), ""]
    for comment, code in _declarations(lines[rest:]):
        names = [_name(each) for each in code]
        if not comment:
            raise ValueError(f"{header.name}: {names[0]} has no comment")
        out += ["### " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)), "", _prose(comment), ""]
        out += ["```cpp" if header.suffix == ".hpp" else "```c", *("\n".join(each) for each in code), "```", ""]
    return "\n".join(out)


def _declarations(lines: list):
    """Yields (comment, declarations): of a comment all that follow it without a blank line."""
    at = 0
    while at < len(lines):
        if not lines[at].strip() or LEFT_OUT.match(lines[at]):
            at += 1
            continue
        comment = []
        if COMMENT.match(lines[at]):
            comment, at = _comment(lines, at)
        code = []
        while at < len(lines) and lines[at].strip() and not LEFT_OUT.match(lines[at]) and not COMMENT.match(lines[at]):
            declaration, at = _declaration(lines, at)
            code.append(declaration)
        if code:
            yield comment, code


def _comment(lines: list, at: int) -> tuple:
    """The lines of the comment that begins at a line, and the line behind it."""
    begin = at
    if lines[at].lstrip().startswith("/*"):
        while "*/" not in lines[at]:
            at += 1
        text = "\n".join(lines[begin : at + 1]).strip().removeprefix("/*").removesuffix("*/")
        return [re.sub(r"^\s*\* ?", "", line) for line in text.split("\n")], at + 1
    while at < len(lines) and re.match(r"\s*//", lines[at]):
        at += 1
    return [re.sub(r"^\s*///? ?", "", line) for line in lines[begin:at]], at


def _declaration(lines: list, at: int) -> tuple:
    """One declaration, of a function with a body only its head, and the line behind it."""
    begin, depth = at, 0
    while True:
        bare = re.sub(r"//.*|/\*.*?\*/|\"[^\"]*\"", "", lines[at])
        depth += bare.count("{") - bare.count("}")
        depth += bare.count("(") - bare.count(")")
        at += 1
        if depth == 0 and re.search(r"[;}]\s*$", bare):
            break
    code = lines[begin:at]
    head = next((i for i, line in enumerate(code) if re.search(r"\)\s*(?:const\s*)?(?:noexcept\s*)?\{", line)), None)
    if head is not None and not re.match(r"(?:struct|enum)", code[0]):
        code = [*code[:head], re.sub(r"\s*\{.*", ";", code[head])]
    return code, at


def _name(code: list) -> str:
    text = re.sub(r"__attribute__\(\(.*?\)\)|\[\[\w+\]\]", "", " ".join(code)).strip()
    if text.startswith("typedef"):
        return re.search(r"(\w+)(?=;$)", text)[1]
    if text.startswith(("struct", "enum")):
        return re.match(r"(?:struct|enum class|enum)\s+(\w+)", text)[1]
    function = re.match(r"[^=(]*?(\w+)\s*\(", text)
    return function[1] if function else re.search(r"(\w+)\s*(?:=|;|\{)", text)[1]


def _prose(comment: list) -> str:
    """Paragraphs; what is indented is code."""
    out, inside = [], False
    for line in textwrap.dedent("\n".join(comment)).split("\n"):
        code = line.startswith("  ") and (inside or not out or not out[-1].strip())
        if code != inside:
            out.append("```cpp" if code else "```")
            inside = code
        out.append(line[2:] if code else re.sub(r"[*_<](?=\w*[\s>])|\[(?=[^\]]*\](?!\())", lambda found: "\\" + found[0], line))
    return "\n".join(out + ["```"] * inside).strip()

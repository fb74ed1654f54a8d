#!/usr/bin/env python3
"""Checks every result file below bench/results against the one schema, bench/results/schema.json.

A line below bench/results/experiments may also be of the kind `experiment`: it counts as having a field of that name, its file's.
Knows the words of JSON Schema that the schema uses, and refuses others. Needs nothing but Python.

Usage: check_results.py [REPOSITORY_ROOT]; prints every fault as file:line and exits non-zero if there is one.
"""
import json
import pathlib
import re
import sys

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
WORDS = {"$schema", "$defs", "$ref", "title", "description", "anyOf", "type", "enum", "const", "required", "properties",
         "additionalProperties", "items", "minItems", "minLength", "pattern", "minimum", "maximum", "exclusiveMinimum"}
RUNS = ("quick",)  # lines that only show that everything works are no results


def is_a(value, name: str) -> bool:
    if name in ("number", "integer"):
        whole = isinstance(value, int) or isinstance(value, float) and value.is_integer()
        return not isinstance(value, bool) and (whole if name == "integer" else isinstance(value, (int, float)))
    return isinstance(value, TYPES[name])


def own_faults(value, schema: dict):
    """What is wrong with a value itself, whatever it holds."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(is_a(value, name) for name in types):
        yield f"{value!r:.60} is not {' or '.join(types)}"
        return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{value!r:.60} is not {schema.get('enum', schema.get('const'))}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield "is empty"
        if not re.search(schema.get("pattern", ""), value):
            yield f"{value!r:.60} does not match {schema['pattern']}"
    if is_a(value, "number"):
        low, above, high = (schema.get(word) for word in ("minimum", "exclusiveMinimum", "maximum"))
        if (low is not None and value < low) or (above is not None and value <= above) or (high is not None and value > high):
            yield f"{value} is out of range"


def faults(value, schema: dict, root: dict):
    unknown = set(schema) - WORDS
    if unknown:
        raise SystemExit(f"check_results: the schema uses {sorted(unknown)}, which this check does not know")
    if "$ref" in schema:
        yield from faults(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
        return
    if "anyOf" in schema:
        tried = []
        for choice in schema["anyOf"]:
            tried.append(list(faults(value, choice, root)))
            if not tried[-1]:
                break
        if all(tried):
            kinds = [choice["$ref"].rpartition("/")[2] for choice in schema["anyOf"]]
            yield "; ".join(f"as {kind}: {found[0]}" for kind, found in zip(kinds, tried))
    own = list(own_faults(value, schema))
    yield from own
    if own:
        return
    if isinstance(value, dict):
        for name in schema.get("required", []):
            if name not in value:
                yield f"lacks {name}"
        for name, item in value.items():
            of_name = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if of_name:
                yield from (f"{name} {fault}" for fault in faults(item, of_name, root))
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield "is empty"
        for item in value if "items" in schema else ():
            yield from faults(item, schema["items"], root)


def file_faults(file: pathlib.Path, schema: dict):
    """Yields (line number, fault); files of one object count as one line."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
        except ValueError as error:
            yield number, f"not JSON: {error}"
            continue
        if file.parent.name == "experiments" and isinstance(item, dict):
            item = {"experiment": file.stem, **item}
        yield from ((number, fault) for fault in faults(item, schema, schema))
        if isinstance(item, dict) and any(item.get(name) for name in RUNS):
            yield number, "is of a run that only shows that everything works"
    if not lines:
        yield 1, "is empty"


def main() -> int:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve() / "bench" / "results"
    schema = json.loads((folder / "schema.json").read_text())
    files = sorted(file for file in folder.rglob("*.json*") if file.name != "schema.json")
    found = [(file, number, fault) for file in files for number, fault in file_faults(file, schema)]
    for file, number, fault in found:
        print(f"{file.relative_to(folder.parent.parent)}:{number}: {fault}")
    print(f"check_results: {len(files)} files, {len(found)} faults")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())

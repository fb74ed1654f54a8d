"""docs/onnxruntime.md says of every input, output and attribute that an operator reads what becomes of it."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OPERATORS = {
    "GroupQueryAttention": "group_query_attention",
    "Attention": "attention",
    "MultiHeadAttention": "multi_head_attention",
    "PagedAttention": "paged_attention",
}
NAME = r"[a-z]\w*|[QKV]"


def section(operator: str) -> str:
    document = (ROOT / "docs/onnxruntime.md").read_text()
    return re.search(rf"^### {operator}\n(.*?)(?=^##|\Z)", document, re.MULTILINE | re.DOTALL)[1]


def attributes_in(code: str) -> set:
    read = set(re.findall(rf'(?:node\.(?:integer|flag|number|string)\(|epsilon_of\(node, )"({NAME})"', code))
    read |= set(re.findall(rf'std::tuple\("({NAME})", "', code)) | set(re.findall(rf'causal_name = "({NAME})"', code))
    return read | {name for both in re.findall(r'attribute : \{"(\w+)", "(\w+)"\}', code) for name in both}


def code_of(operator: str) -> str:
    folder = ROOT / "integrations/onnxruntime"
    code = (folder / f"{OPERATORS[operator]}.cpp").read_text()
    shared = ("grouped.cpp", "head_norms.cpp") if '"grouped.hpp"' in code else ()
    return "".join([code, *((folder / name).read_text() for name in shared)])


@pytest.mark.parametrize("operator", OPERATORS)
def test_rewrite_knows_the_attributes_that_the_code_reads(operator):
    ort = pytest.importorskip("lean_attention.ort")
    of_refused = {"qk_matmul_output_mode"}
    assert ort.ATTRIBUTES[operator] - of_refused == attributes_in(code_of(operator))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_table_names_what_the_code_reads(operator):
    code = code_of(operator)
    ports = re.search(r"kInputs\[\] = \{(.*?)\};\s*static constexpr Port kOutputs\[\] = \{(.*?)\};", code, re.DOTALL)
    names = {name for side in ports.groups() for name in re.findall(rf'\{{"({NAME})"', side)} - {"output", "Y"}
    names |= attributes_in(code)
    assert len(names) >= 13
    said = set(re.findall(r"`(\w+)`", section(operator)))
    assert names - said == set()


def test_the_operators_are_those_that_rewrite_knows():
    ort = pytest.importorskip("lean_attention.ort")
    assert {name for _, name in ort.SERVED} == set(OPERATORS)

"""The guides of docs/guides say what the code does: messages, the arguments of drop-ins, the schedule that is explained."""

import functools
import inspect
import pathlib
import re

import numpy as np
import pytest

import lean_attention
from lean_attention import Options, decode

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
MESSAGE = re.compile(r"^### `(.+)`$", re.M)
VARIES = "…"


def messages():
    return MESSAGE.findall((GUIDES / "troubleshooting.md").read_text())


@functools.cache
def source():
    """All messages of the library and the package, strings that stand side by side as one."""
    files = [file for folder in ("src", "python") for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".cpp", ".hpp", ".cu")]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def fragments(message):
    """What of a message must stand in the source: the text between what varies, and between the sizes of a shape."""
    return [part.strip(" :;,[]()=") for part in re.split(rf"{VARIES}|: |; | = |\[|\]", message)]


def arrays():
    q = np.ones((2, 4, 64), np.float32)
    k, v = np.ones((2, 2, 2, 128, 64), np.float32)
    return q, k, v


FAILING = [
    lambda q, k, v: decode(q[:, :3], k, v),
    lambda q, k, v: decode(q, k[..., :32], v),
    lambda q, k, v: decode(q, k, v, cu_seqlens_k=[0, 1, 2]),
    lambda q, k, v: decode(q, k, v, cu_seqlens_q=[0, 1, 3]),
    lambda q, k, v: decode(q, k, v, seqlens=[1]),
    lambda q, k, v: decode(q, k, v, mask=np.ones((2, 4, 1, 100), bool)),
    lambda q, k, v: decode(*(np.ones((1, 1, 8, 600), np.float32),) * 3),
    lambda q, k, v: decode(q, k.astype(np.float16), v),
    lambda q, k, v: decode(q.astype(np.float64), k, v),
    lambda q, k, v: decode(q, k, v, sinks=np.ones(4)),
    lambda q, k, v: decode(q, k, v, k_scale=2.0),
    lambda q, k, v: decode(q, k, v, seqlens=[1.5, 2]),
    lambda q, k, v: decode(np.ma.masked_array(q), k, v),
    lambda q, k, v: decode(q, k, v, seqlens=[500, 1]),
    lambda q, k, v: decode(q, k, v, block_table=np.zeros((2, 1), np.int32)),
    lambda q, k, v: decode(q, k, v, append_k=np.ones((2, 2, 64), np.float32)),
    lambda q, k, v: decode(q, k, v, rotary_cos=np.ones((128, 32), np.float32), rotary_sin=np.ones((128, 32), np.float32)),
    lambda q, k, v: Options(policy="other"),
    lambda q, k, v: decode(q, k, v, options=Options(policy="data_parallel", determinism="batch_invariant")),
    lambda q, k, v: decode(q, k, v, options=Options(policy="fixed_split", fixup="host_block")),
    lambda q, k, v: decode(q, k, v, softmax_scale=1.0),
]


def seen(change):
    q, k, v = arrays()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        change(q, k, v)
    return str(caught.value)


def is_said(message, by):
    return re.match(".*".join(map(re.escape, by.split(VARIES))), message)


@pytest.mark.parametrize("change", FAILING)
def test_a_message_that_is_seen_is_on_the_page(change):
    message = seen(change)
    assert any(is_said(message, by) for by in messages()), message


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_is_seen_or_in_the_source(message):
    if any(is_said(seen(change), message) for change in FAILING):
        return
    wanted = [part for part in fragments(message) if len(part) > 12]
    assert wanted, "nothing of it can be looked for"
    assert [part for part in wanted if part not in source()] == []


def rows(page, heading):
    """Names of arguments and their status, of the tables under one heading."""
    text = (GUIDES / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = {}
    for names, status in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (taken|ignored|refused) \|", text, re.M):
        found.update(dict.fromkeys(re.findall(r"\w+", names), status))
    return found


def parameters(function):
    given = inspect.signature(function).parameters.values()
    return {each.name for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)} - {"self"}


def test_arguments_of_flash_attention():
    pytest.importorskip("torch")
    from lean_attention.compat import flash_attn as drop_in

    known = rows("from-flash-attention.md", "flash_attn_with_kvcache")
    taken = {name for name, status in known.items() if status == "taken"}
    assert taken == parameters(drop_in.flash_attn_with_kvcache)
    assert {name for name, status in known.items() if status == "ignored"} == set(drop_in._HINTS)
    assert {name for name, status in known.items() if status == "refused"} == set(drop_in._REFUSED)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        assert set(rows("from-flash-attention.md", name)) == parameters(getattr(drop_in, name))


def test_arguments_of_flashinfer():
    pytest.importorskip("torch")
    from lean_attention.compat import _flashinfer_rules as rules
    from lean_attention.compat import _flashinfer_wrapper, flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    assert set(rows("from-flashinfer.md", wrapper.__name__)) == parameters(wrapper.__init__)
    plan = rows("from-flashinfer.md", "plan")
    assert set(plan) == parameters(wrapper.plan) | set(rules.PLAN_HINTS) | set(rules.PLAN_REFUSED)
    assert {name for name, status in plan.items() if status == "refused"} == set(rules.PLAN_REFUSED)
    run = rows("from-flashinfer.md", "run")
    taken = parameters(wrapper.run) | parameters(_flashinfer_wrapper.Wrapper._attend) - {"cache", "cu_seqlens_q", "args"}
    assert {name for name, status in run.items() if status == "taken"} == taken
    assert {name for name, status in run.items() if status == "ignored"} == set(rules.RUN_HINTS)
    assert {name for name, status in run.items() if status == "refused"} == set(rules.RUN_REFUSED)


def test_every_wrapper_of_flashinfer_is_named():
    pytest.importorskip("torch")
    from lean_attention.compat import flashinfer

    page = (GUIDES / "from-flashinfer.md").read_text()
    assert [name for name in flashinfer.__all__ if f"`{name}`" not in page and name != "fast_decode_plan"] == []


def test_the_schedule_that_is_explained():
    options = Options(workers=5)
    schedule = lean_attention.schedule([5000, 300, 1200], q_heads=4, kv_heads=1, head_dim=64, options=options)
    shown = re.search(r"```text\n(.*?)\n```", (GUIDES / "reading-a-schedule.md").read_text(), re.S)[1]
    assert [line.rstrip() for line in str(schedule).strip().splitlines()] == [line.rstrip() for line in shown.splitlines()]
    assert schedule.to_svg() == (ROOT / "docs" / "schedule-example.svg").read_text()

"""pytest plugin of run.py: samples parametrisations, sends "cuda" to the device asked for, and sorts outcomes."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import stand_ins

DEVICE = os.environ["LEAN_PEERS_DEVICE"]
SAMPLE = int(os.environ["LEAN_PEERS_SAMPLE"])
SEED = int(os.environ["LEAN_PEERS_SEED"])
MOST_WORK = float(os.environ["LEAN_PEERS_MOST_WORK"])

#: Names of parameters whose product is a test's work; several names of one size: the largest.
SIZES = (
    ("batch_size",), ("seqlen_q", "q_len", "qo_len", "seqlen", "unique_kv_len"), ("seqlen_k", "kv_len", "seq_len", "shared_kv_len"),
    ("num_qo_heads", "num_heads"), ("d", "head_dim"), ("num_blocks",),
)  # fmt: skip


def pytest_configure() -> None:
    stand_ins.install()
    if DEVICE == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.empty_cache = lambda: None
        torch.cuda.current_device = lambda: 0
        torch.set_default_device = lambda *_: None
        torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda *_: None


class OnTheCpu(TorchFunctionMode):
    """The peers' tests name their device; here it is the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if _names_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        moves = function in (torch.Tensor.to, torch.device)
        if moves and len(args) > 1 and (_names_gpu(args[1]) or type(args[1]) is int):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


def _names_gpu(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """A sample instead of the product of all parameters, which may be hundreds of thousands."""
    marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
    axes = []
    for mark in marks:
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        axes.append((names, list(values)))
    if not axes:
        return
    metafunc.definition.own_markers[:] = [mark for mark in metafunc.definition.own_markers if mark.name != "parametrize"]
    every = [name for names, _ in axes for name in names]
    rows = _sampled(f"{SEED} {metafunc.definition.name}", axes)
    metafunc.parametrize(every, [pytest.param(*row) for row in rows])


def _sampled(seed: str, axes: list) -> list:
    rows = []
    tries: Any = itertools.product(*(values for _, values in axes))
    if _product(len(values) for _, values in axes) > 20 * SAMPLE:
        stream = random.Random(seed)
        tries = ([stream.choice(values) for _, values in axes] for _ in range(200 * SAMPLE))
    for chosen in tries:
        row = []
        for (names, _), value in zip(axes, chosen):
            value = value.values if hasattr(value, "values") and hasattr(value, "marks") else value
            row += [value] if len(names) == 1 and not (isinstance(value, tuple) and hasattr(chosen, "marks")) else list(value)
        names = [name for names, _ in axes for name in names]
        if row not in rows and _work(dict(zip(names, row))) <= MOST_WORK:
            rows.append(row)
        if len(rows) == SAMPLE and not isinstance(tries, itertools.product):
            break
    if len(rows) > SAMPLE:
        rows = random.Random(seed).sample(rows, SAMPLE)
    return rows


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _work(parameters: dict[str, Any]) -> float:
    work = 1.0
    for names in SIZES:
        numbers = [parameters[name] for name in names if isinstance(parameters.get(name), int)]
        work *= max(numbers, default=1)
    return work


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    torch.manual_seed(0)
    if DEVICE == "cpu":
        with OnTheCpu():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        outcome, reason = _sorted(report.outcome, call.excinfo)
        parameters = {name: repr(value) for name, value in getattr(getattr(item, "callspec", None), "params", {}).items()}
        line = dict(test=item.originalname or item.name, parameters=parameters, outcome=outcome, reason=reason)
        with open(os.environ["LEAN_PEERS_REPORT"], "a") as file:
            file.write(json.dumps(line) + "\n")
    return report


def _sorted(outcome: str, excinfo: Any) -> tuple[str, str]:
    if excinfo is None:
        return outcome, ""
    error = excinfo.value
    text = re.sub(r"\s+", " ", str(error))[:400]
    if outcome == "skipped" or isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception)):
        return "skipped", text
    if isinstance(error, NotImplementedError):
        return "refused", text
    if isinstance(error, stand_ins.NoBackwardPass):
        return "passed", "the forward pass alone: there is no backward pass"
    if DEVICE == "cpu" and isinstance(error, (RuntimeError, AssertionError)) and ("CUDA" in text or "NVIDIA" in text):
        return "skipped", f"needs a GPU: {text}"
    return "failed", f"{type(error).__name__}: {text}"

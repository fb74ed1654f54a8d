#!/usr/bin/env python3
"""Runs other libraries' own tests through this library's doors, and says how many passed, were refused by name, or failed.

Usage: run.py FOLDER [--device cpu|cuda] [--sample N] [--seed N] [--suite WORD] [--jobs N] [--json FILE]

FOLDER has the libraries' repositories, which are not kept here, as folders `flash-attention`, `flashinfer`, `vllm` and `transformers`;
suites whose folder is missing are passed over, and said to be. Their tests are imported as they are; stand_ins.py gives them modules
of their libraries' names made of this library's doors, and Transformers' models, of the release that is installed, have our attention
under the name "sdpa" (in_place_of_sdpa.py). Of each test's parametrisations a seeded sample is run, those of little work alone. Every
refusal and failure needs a waiver with its reason in ledger.json, and a waiver that nothing needed any more fails too: then the ledger
is out of date. Needs torch, pytest and einops beside the installed package; for Transformers' tests that, parameterized and httpx.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    folder: str  # of FOLDER: on the path
    file: str
    tests: str = ""  # pytest's -k
    most_work: float = 5e7  # product of what a test says about its sizes (plugin.py)
    single: str = "door"  # FlashInfer's single_*_with_kv_cache: our doors, or torch's operations where they are the expectation
    plugin: str = "plugin"


MODEL_TESTS = "(sdpa_inference or generate or static or beam or assisted) and not Integration and not dispatch"


def of_model(name: str) -> Suite:
    """Transformers' tests of a model, those of attention and caches."""
    return Suite(f"transformers {name}", "transformers", f"tests/models/{name}/test_modeling_{name}.py", MODEL_TESTS, plugin="in_place_of_sdpa")


SUITES = (
    Suite("flash-attention 2", "flash-attention/tests", "test_flash_attn.py", "kvcache or num_splits", 3e6),
    Suite("flash-attention 2, packed", "flash-attention/tests", "test_flash_attn.py", "output or causal or splitkv", 3e6),
    Suite("flash-attention 3", "flash-attention/hopper", "test_flash_attn.py", "kvcache", 3e6),
    Suite("flash-attention 3, packed", "flash-attention/hopper", "test_flash_attn.py", "output", 3e6),
    Suite("flash-attention 3, caches", "flash-attention/hopper", "test_attn_kvcache.py", "", 3e7),
    Suite("vllm packed", "vllm", "tests/kernels/attention/test_flash_attn.py", "", 1e4),
    Suite("flashinfer decode", "flashinfer", "tests/attention/test_batch_decode_kernels.py", "not nvfp4", 1e8, "torch"),
    Suite("flashinfer strides", "flashinfer", "tests/attention/test_non_contiguous_decode.py", "", 1e8, "torch"),
    Suite("flashinfer tensor cores", "flashinfer", "tests/attention/test_tensor_cores_decode.py", "", 1e8),
    Suite("flashinfer windows", "flashinfer", "tests/attention/test_sliding_window.py", "", 5e7, "torch"),
    Suite("flashinfer softcap", "flashinfer", "tests/attention/test_logits_cap.py", "", 5e7),
    Suite("flashinfer ALiBi", "flashinfer", "tests/attention/test_alibi.py", "", 5e7),
    Suite("flashinfer fp8", "flashinfer", "tests/attention/test_decode_fp8_calibration_scale.py", "", 1e8),
    Suite("flashinfer empty", "flashinfer", "tests/attention/test_decode_prefill_lse.py"),
    Suite("flashinfer prefill", "flashinfer", "tests/attention/test_batch_prefill_kernels.py", "not nvfp4", 5e7, "torch"),
    Suite("flashinfer cascade", "flashinfer", "tests/attention/test_shared_prefix_kernels.py", "", 5e7),
    Suite("flashinfer MLA", "flashinfer", "tests/attention/test_deepseek_mla.py", "", 5e7),
    Suite("flashinfer single prefill", "flashinfer", "tests/attention/test_single_prefill.py", "not nvfp4", 5e7),
    Suite("flashinfer strides of prefill", "flashinfer", "tests/attention/test_non_contiguous_prefill.py", "", 1e7),
    Suite("flashinfer batch-invariant", "flashinfer", "tests/attention/test_batch_invariant_fa2.py", "", 1e8),
    *map(of_model, ("llama", "gemma2", "gpt_oss", "t5gemma", "mistral")),
)


@dataclasses.dataclass
class Outcome:
    test: str
    parameters: dict[str, str]
    outcome: str  # passed, refused, failed, skipped
    reason: str


def run_suite(suite: Suite, folder: pathlib.Path, arguments: argparse.Namespace) -> list[Outcome]:
    target = folder / suite.folder / suite.file
    if not target.is_file():
        raise SystemExit(f"FOLDER: {target} is not there")
    path = (os.environ.get("PYTHONPATH", ""), str(HERE), str(folder / suite.folder))
    root, importing = folder, "importlib"
    if suite.plugin == "in_place_of_sdpa":  # tests of a package `tests`, which look for what lies beside it
        root, importing = folder / suite.folder, "prepend"
        path += (str(root / "utils"),)
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(path), LEAN_PEERS_REPORT=report.name, LEAN_PEERS_FOLDER=str(folder),
            LEAN_PEERS_DEVICE=arguments.device, LEAN_PEERS_SAMPLE=str(arguments.sample),
            LEAN_PEERS_SEED=str(arguments.seed), LEAN_PEERS_MOST_WORK=str(suite.most_work), LEAN_PEERS_SINGLE=suite.single,
            FLASH_ATTENTION_DISABLE_BACKWARD="TRUE",
        )  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(root), "-p", suite.plugin,
            "-p", "no:cacheprovider", f"--import-mode={importing}", "--tb=short", "-k", suite.tests, str(target),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
        lines = report.read().splitlines()
    if not lines:
        raise SystemExit(f"{suite.name}: no test ran:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    if arguments.verbose:
        print(done.stdout)
    return [Outcome(**json.loads(line)) for line in lines]


def waives(waiver: dict, suite: str, outcome: Outcome) -> bool:
    """`where` names parameters and the values, as repr, that a test must have; `device`, where it may be needed."""
    return (
        suite.startswith(waiver["suite"])
        and outcome.test.startswith(waiver.get("test", ""))
        and all(outcome.parameters.get(name) in values for name, values in waiver.get("where", {}).items())
    )


def check(suite: str, outcomes: list[Outcome], ledger: list[dict], used: collections.Counter) -> list[str]:
    """What the ledger does not say: refusals and failures without a waiver, and passes that a waiver says cannot be."""
    faults = []
    for outcome in outcomes:
        of_test = [(i, waiver) for i, waiver in enumerate(ledger) if waives(waiver, suite, outcome)]
        if outcome.outcome in ("refused", "failed"):
            fits = [i for i, w in of_test if w["outcome"] == outcome.outcome and w["says"] in outcome.reason]
            used.update(fits)
            if not fits:
                faults.append(f"{suite}: {outcome.test}{outcome.parameters}: {outcome.outcome}: {outcome.reason}")
        elif outcome.outcome == "passed" and any(waiver.get("always") for _, waiver in of_test):
            faults.append(f"{suite}: {outcome.test}{outcome.parameters}: passed, though the ledger says it cannot")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sample", type=int, default=12, help="parametrisations of each test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", default="", help="those whose name has this word")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="where every outcome goes")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if importlib.util.find_spec("einops") is None:
        raise SystemExit("einops: the peers' tests need it: pip install einops")
    folder = arguments.folder.resolve()
    ledger = json.loads((HERE / "ledger.json").read_text())
    asked_for = [suite for suite in SUITES if arguments.suite in suite.name]
    suites = [suite for suite in asked_for if (folder / suite.folder.partition("/")[0]).is_dir()]
    for suite in asked_for:
        if suite not in suites:
            print(f"{suite.name}: passed over: FOLDER has no {suite.folder}")
    used: collections.Counter = collections.Counter()
    faults: list[str] = []
    everything = {}
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda suite: run_suite(suite, folder, arguments), suites)
        print(f"{'suite':28} passed refused  failed skipped")
        for suite, outcomes in zip(suites, results):
            counts = collections.Counter(outcome.outcome for outcome in outcomes)
            print(f"{suite.name:28}" + "".join(f"{counts[x]:7} " for x in ("passed", "refused", "failed", "skipped")), flush=True)
            reasons = collections.Counter((o.outcome, o.reason) for o in outcomes if o.outcome in ("refused", "passed"))
            for (kind, reason), count in reasons.most_common():
                if reason:
                    print(f"{count:11} {kind}: {reason[:110]}")
            faults += check(suite.name, outcomes, ledger, used)
            everything[suite.name] = [dataclasses.asdict(outcome) for outcome in outcomes]
    if suites == list(SUITES):
        for i, waiver in enumerate(ledger):
            if not used[i] and waiver.get("device", arguments.device) == arguments.device:
                faults.append(f"ledger.json: nothing needed {waiver}: take it out, or sample more")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))
    for fault in faults:
        print(f"NOT IN THE LEDGER  {fault[:600]}")
    asked = f"{arguments.device}, sample {arguments.sample}, seed {arguments.seed}"
    print(f"{asked}: {len(faults)} not in the ledger, {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

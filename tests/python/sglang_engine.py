"""Runs SGLang's engine for test_sglang.py: sglang_engine.py CASES.json RESULTS_FOLDER.

A case is a model's folder, the engine's arguments and batches of prompts; its result is a file with the tokens, or with the error.
SGLang takes long to import, so cases are children of a process that has it, and so are the processes of the engine, which
would start afresh.
"""

import json
import multiprocessing
import os
import pathlib
import sys
import time
import traceback

MOST_SECONDS = 300
FIXED = dict(
    device="cpu", sampling_backend="pytorch", skip_tokenizer_init=True, disable_overlap_schedule=True, disable_cuda_graph=True,
    dtype="float32", log_level="error", random_seed=0,
)  # fmt: skip


def import_all() -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner  # noqa: F401

    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)


def tokens_of(case: dict) -> dict:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(model_path=case["model"], **{**FIXED, "max_total_tokens": 4096, **case["engine"]})
    sampling = dict(temperature=0, max_new_tokens=case["new_tokens"], ignore_eos=True)
    batches = [engine.generate(input_ids=prompts, sampling_params=sampling) for prompts in case["batches"]]
    return dict(
        tokens=[[each["output_ids"] for each in batch] for batch in batches],
        cached=[[each["meta_info"]["cached_tokens"] for each in batch] for batch in batches],
    )


def child(case: dict, result: pathlib.Path) -> None:
    """Does not come back, and leaves no process behind."""
    os.setsid()
    try:
        written = json.dumps(tokens_of(case))
    except BaseException:
        written = json.dumps(dict(error=traceback.format_exc()))
    result.with_suffix(".part").write_text(written)
    result.with_suffix(".part").rename(result)
    os.killpg(0, 9)


def main() -> None:
    cases, folder = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
    import_all()
    waiting, running = list(cases.items()), {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name, case = waiting.pop(0)
            process = os.fork()
            if process == 0:
                child(case, folder / f"{name}.json")
            running[process] = (name, time.monotonic())
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in running:
            result = folder / f"{running.pop(done)[0]}.json"
            if not result.exists():
                result.write_text(json.dumps(dict(error=f"the engine ended with status {status}: see what it printed")))
        for process, (name, begin) in running.items():
            if time.monotonic() - begin > MOST_SECONDS:
                os.killpg(process, 9)
        time.sleep(0.1)


if __name__ == "__main__":
    main()

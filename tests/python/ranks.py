"""Processes of torch.distributed for tests: ranks that run a function each and hand back what it returned or raised."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from typing import Any, Callable

LIMIT_S = 120  # for a test that would otherwise not end

# Processes are forked from one that has imported torch and started no thread.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["lean_attention.distributed", __name__])


class RankFailed(AssertionError):
    """A rank raised what its test did not expect; the text is its traceback."""


def run(count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0, backend: str = "gloo") -> list:
    """function(*arguments) on `count` ranks; what each returned. None for one that ended without a word."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_processes.Pipe(duplex=False) for _ in range(count)]
        ranks = []
        for rank, (_, sender) in enumerate(pipes):
            settings = (backend, f"file://{folder}/store", rank, count, timeout_s)
            ranks.append(_processes.Process(target=_rank, args=(sender, settings, function, arguments), daemon=True))
            ranks[-1].start()
            sender.close()  # so that a rank that dies is noticed
        results = [_result(receiver) for receiver, _ in pipes]
        for process in ranks:
            process.join(LIMIT_S)
            process.kill()
    return results


def _result(receiver: Any) -> Any:
    try:
        if not receiver.poll(LIMIT_S):
            raise RankFailed(f"a rank did not end within {LIMIT_S} s")
        succeeded, value = receiver.recv()
    except EOFError:
        return None
    if not succeeded:
        raise RankFailed(value)
    return value


def _rank(sender: Any, settings: tuple, function: Callable[..., Any], arguments: tuple) -> None:
    import torch
    import torch.distributed as dist

    backend, store, rank, count, timeout_s = settings
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=timeout)
        sender.send((True, function(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # a group whose peers are gone must not hold the process

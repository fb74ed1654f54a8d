"""vLLM with two processes that share the tokens of every sequence (decode context parallelism): what one process generates.

On the CPU with stand-ins for what vLLM lacks there (tests/python/vllm_ranks.py); on two GPUs as it is.
"""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import queue
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no vllm", allow_module_level=True)

import numpy as np
import torch
import vllm_ranks

LIMIT_S = 600  # of an engine's start and run
SHARED = dict(tensor_parallel_size=2, decode_context_parallel_size=2)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the engine takes the GPU")
on_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vllm_ranks.save_model(str(folder))
    return str(folder)


def run(model, environment, **settings):
    command = [sys.executable, pathlib.Path(vllm_ranks.__file__), model, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return vllm_ranks.result_of(done)


ON_CPU = dict(dtype="float32", enforce_eager=True)
ON_CPU_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(model):
    """One process with vLLM's own attention."""
    return run(model, {**os.environ, **ON_CPU_VARIABLES, "LEAN_ATTENTION_VLLM": "0"}, **ON_CPU)


@on_cpu
@pytest.mark.parametrize("interleave", [1, 16])
def test_two_processes_generate_what_one_does(interleave, model, alone, tmp_path):
    """Prompts in chunks of up to 16 tokens beside decode rows, then decode rows alone."""
    environment = {**vllm_ranks.plug_in(tmp_path), **ON_CPU_VARIABLES}
    shared = run(model, environment, cp_kv_cache_interleave_size=interleave, **SHARED, **ON_CPU)
    assert shared["greedy"] == alone["greedy"]
    for kind in ("new", "given"):
        for chances, chances_alone in zip(shared[kind], alone[kind]):
            np.testing.assert_allclose(chances, chances_alone, atol=1e-3, rtol=0)


def exact(model, given):
    """Of each prompt, by eager attention in fp64: log-probabilities of its tokens after the first, and of all that may come next."""
    import transformers

    known = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for prompt in given:
            tokens = torch.tensor([prompt])
            chances = known(tokens).logits[0].log_softmax(-1)
            yield chances[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy(), chances[-1].numpy()


@on_gpus
def test_on_gpus_ranks_are_as_near_to_exact_as_flash_attentions(tmp_path):
    """Chunks of up to 16 tokens and captured decode steps of an engine in bf16; its own FlashAttention shares the tokens too."""
    from vllm_models import prompts

    folder = str(tmp_path / "half")
    vllm_ranks.save_model(folder, dtype="bfloat16")
    graphs = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8])
    # a cache of so many bytes is not measured out at the start, which two engines on a GPU would do in each other's way
    memory = dict(gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 28)
    settings = dict(dtype="bfloat16", compilation_config=graphs, disable_custom_all_reduce=True, **memory)
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}
    wanted = {
        "ours": dict(attention_backend="CUSTOM", **SHARED),
        "theirs": dict(attention_backend="FLASH_ATTN", **SHARED),
        "ours, runs of 16": dict(attention_backend="CUSTOM", cp_kv_cache_interleave_size=16, **SHARED),
        "alone": dict(attention_backend="CUSTOM"),
    }
    pairs = queue.SimpleQueue()  # of GPUs, two engines on each at a time: most of an engine's time is its start, on the CPU
    for first in 2 * list(range(0, torch.cuda.device_count() - 1, 2)):
        pairs.put(f"{first},{first + 1}")

    def found(name):
        pair = pairs.get()
        try:
            return run(folder, {**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": pair}, **settings, **wanted[name])
        finally:
            pairs.put(pair)

    with concurrent.futures.ThreadPoolExecutor(pairs.qsize()) as pool:
        results = dict(zip(wanted, pool.map(found, wanted)))
    given, following = zip(*exact(folder, prompts(vllm_ranks.LENGTHS, 4)))
    truth = np.concatenate(given)
    apart = {name: np.abs(np.concatenate(result["given"]) - truth) for name, result in results.items()}
    tokens = {name: np.array(result["greedy"]) for name, result in results.items()}
    for name in wanted:
        same = (tokens[name] == tokens["alone"]).mean()
        print(f"{name}: from exact by {apart[name].mean():.2e} (mean), {apart[name].max():.2e}; {same:.0%} of tokens as alone's")
    assert apart["theirs"].mean() > 1e-5  # else there is nothing to compare
    for name in ("ours", "ours, runs of 16"):
        assert apart[name].mean() < 1.25 * apart["theirs"].mean() and apart[name].max() < 2 * apart["theirs"].max()
        for chances, token in zip(following, tokens[name][:, 0]):  # the likeliest, or one as likely as far as bf16 tells
            assert chances[token] >= chances.max() - 2 * apart["theirs"].max()

"""vLLM itself with this library's attention, on the CPU: the tokens of its own attention, whatever the scheduler does.

Runs in .venv-vllm (tools/setup.sh), and nowhere else; tests/python/test_vllm_call.py has what needs no engine.
"""

import asyncio
import concurrent.futures
import importlib
import importlib.util
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import types
import urllib.request

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("no vllm", allow_module_level=True)

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, where calls can be counted
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
from vllm_models import CONTEXT, choose, engine, folder_of, generate, log_probabilities, prompts, register_kernels_once

from lean_attention import _core, _vllm_call
from lean_attention import vllm as plugin

register_kernels_once()
KINDS = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "opt", "bloom")
UNEVEN = (5, 130, 33, 300, 64, 1, 17, 201)
START_S = 600  # of a server, at most
SAME_LOGPROB = 1e-3  # fp32 through two layers, sums in another order; measured: 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: folder_of(kind, folder)


@pytest.fixture
def calls(monkeypatch):
    """What the layers of this library are asked for: (longest query, requests, whether K and V are written)."""
    seen = []
    attend = _vllm_call.PagedLayer.attend

    def noted(self, query, key, value, pages, batch, out, scales=(1.0, 1.0)):
        seen.append((batch.max_query_len, len(batch.seq_lens), self.writes))
        return attend(self, query, key, value, pages, batch, out, scales)

    monkeypatch.setattr(_vllm_call.PagedLayer, "attend", noted)
    return seen


def assert_same(ours, theirs):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, mine), (_, other) in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, atol=SAME_LOGPROB, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_engines_own_attention(kind, models, calls):
    """Long uneven prompts in chunks of 64 tokens beside decode rows; then again, from cached prefixes."""
    given = prompts(UNEVEN)
    longer = [prompt + [7, 8, 9] for prompt in given]
    with engine(models(kind), ours=False) as llm:
        theirs, theirs_longer = generate(llm, given), generate(llm, longer)
    assert not calls
    with engine(models(kind), ours=True) as llm:
        ours, ours_longer = generate(llm, given), generate(llm, longer)
    assert_same(ours, theirs)
    assert_same(ours_longer, theirs_longer)
    longest, requests = [call[0] for call in calls], [call[1] for call in calls]
    assert max(longest) > 8 and min(longest) == 1 and max(requests) > 4
    assert any(length > 1 and count > 1 for length, count in zip(longest, requests))  # prefill and decode in one call


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_bf16_is_as_near_to_fp32_as_the_engines_own_attention(kind, models, calls):
    """Log-probabilities of given tokens, so that no choice of a token can hide a difference or make one."""
    given = prompts(UNEVEN)[:6]
    found = {}
    for name, ours, dtype in (("exact", False, "float32"), ("theirs", False, "bfloat16"), ("ours", True, "bfloat16")):
        with engine(models(kind), ours=ours, dtype=dtype, enable_prefix_caching=False) as llm:
            found[name] = np.concatenate([np.array(each) for each in log_probabilities(llm, given)])
    assert calls
    mine, other = (np.abs(found[name] - found["exact"]) for name in ("ours", "theirs"))
    assert other.mean() > 1e-3  # else there is nothing to compare
    assert mine.mean() < 1.25 * other.mean() and mine.max() < 2 * other.max()


def test_sinks_that_are_loaded_anew_in_their_memory_count(models, calls):
    """In 16 bits, of which the kernels take no sinks: a copy in 32 that was made once would be the old ones'."""
    given = prompts(UNEVEN)[:4]

    def turn(model):
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.copy_(parameter.data.flip(0))

    found = []
    with engine(models("gpt_oss"), ours=True, dtype="bfloat16", enable_prefix_caching=False) as llm:
        for _ in range(3):
            found.append(np.concatenate(log_probabilities(llm, given)))
            llm.apply_model(turn)
    assert calls and np.abs(found[1] - found[0]).max() > 0.1
    np.testing.assert_array_equal(found[2], found[0])


def toward_zero(x):
    """The nearest E4M3 number that is no larger, as vLLM's CPU kernels write it, in x's type: bits are cut off, none rounded."""
    rounded = x.to(torch.float8_e4m3fn)
    grew = rounded.float().abs() > x.float().abs()
    return torch.where(grew, rounded.view(torch.uint8) - 1, rounded.view(torch.uint8)).view(torch.float8_e4m3fn).to(x.dtype)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has float8 caches on CPUs with AVX-512 only")
def test_a_float8_cache_is_as_near_to_a_wide_one_as_the_engines_own(models, calls, monkeypatch):
    """The engine cuts bits off where this library rounds to the nearest: two caches that are both right are further from each
    other than from the wide one. Keys and values that are cut ahead leave nothing to round, and both engines are one, but for
    AMX, with which the engine rounds weights as well (0.05 apart then)."""
    given = prompts(UNEVEN)[:6]
    found = {}
    attend = _vllm_call.PagedLayer.attend
    for name, ours, cache in (
        ("wide", False, "auto"), ("theirs", False, "fp8"), ("ours", True, "fp8"), ("theirs without AMX", False, "fp8"), ("cut", True, "fp8")
    ):  # fmt: skip
        if name == "theirs without AMX":
            monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        if name == "cut":
            monkeypatch.setattr(
                _vllm_call.PagedLayer, "attend",
                lambda self, query, key, value, *others: attend(self, query, toward_zero(key), toward_zero(value), *others),
            )  # fmt: skip
        with engine(models("llama"), ours=ours, dtype="bfloat16", kv_cache_dtype=cache, enable_prefix_caching=False) as llm:
            found[name] = np.concatenate([np.array(each) for each in log_probabilities(llm, given)])
    assert calls
    mine, theirs = (np.abs(found[name] - found["wide"]).mean() for name in ("ours", "theirs"))
    assert theirs > 1e-2 and mine > 1e-2  # both are rounded
    assert mine < 1.25 * theirs
    apart = np.abs(found["cut"] - found["theirs without AMX"]).mean()
    assert apart < 0.02 * np.abs(found["ours"] - found["theirs"]).mean()  # 0.0007 of 0.46


def test_sixty_four_requests_preempted_and_aborted(models, calls, monkeypatch):
    """One engine has room for all; one, with pages of 32 tokens, for a few, and starts requests over."""
    from vllm.v1.core.sched.scheduler import Scheduler

    given = prompts(tuple(1 + 37 * i % 150 for i in range(64)), seed=2)
    quick = dict(enable_prefix_caching=False, max_num_batched_tokens=512)
    with engine(models("llama"), ours=False, **quick) as llm:
        theirs = generate(llm, given, tokens=40)
    preempted = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, *a, **k: (preempted.append(a[0]), preempt(self, *a, **k))[1])
    with engine(models("llama"), ours=True, **quick) as llm:
        assert_same(generate(llm, given, tokens=40), theirs)
        assert max(requests for _, requests, _ in calls) == 64
    assert not preempted
    with engine(models("llama"), ours=True, max_num_batched_tokens=512, block_size=32, num_gpu_blocks_override=40) as llm:
        assert_same(generate(llm, given, tokens=40), theirs)
        assert len(preempted) > 3
        assert_same(_with_every_third_aborted(llm, given[:20]), [theirs[i] for i in range(20) if i % 3])


def _with_every_third_aborted(llm, given):
    from vllm import SamplingParams

    core, aborted = llm.llm_engine, [f"abort-{i}" for i in range(0, len(given), 3)]
    parameters = SamplingParams(temperature=0, max_tokens=40, logprobs=0, detokenize=False, ignore_eos=True)
    for i, prompt in enumerate(given):
        core.add_request(f"abort-{i}", {"prompt_token_ids": prompt}, parameters)
    done, steps = {}, 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        steps += 1
        if steps == 12:
            core.abort_request(aborted)
    assert not any(name in done and len(done[name].token_ids) == 40 for name in aborted)
    outputs = [done[f"abort-{i}"] for i in range(len(given)) if i % 3]
    return [(list(o.token_ids), [at[t].logprob for t, at in zip(o.token_ids, o.logprobs)]) for o in outputs]


def test_several_guessed_tokens_of_a_request_in_one_step(models, calls):
    """Speculation: a repeated text is guessed from the prompt, and guesses are checked by one call."""
    given = [prompt * 6 for prompt in prompts((9, 14, 5, 11))]
    with engine(models("llama"), ours=False) as llm:
        theirs = generate(llm, given, tokens=30)
    guess = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    with engine(models("llama"), ours=True, speculative_config=guess, max_num_batched_tokens=512) as llm:
        calls.clear()
        assert [tokens for tokens, _ in generate(llm, given, tokens=30)] == [tokens for tokens, _ in theirs]
    assert any(length == 4 for length, _, _ in calls)


def test_an_encoder_stays_the_engines(models, calls):
    """Layers without a cache are handed over: the same bits."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts((5, 40, 17))]
    pooling = dict(runner="pooling", max_model_len=512, max_num_batched_tokens=512, skip_tokenizer_init=False)
    found = []
    for ours in (False, True):
        with engine(models("bert"), ours=ours, **pooling) as llm:
            found.append([output.outputs.embedding for output in llm.embed(given, use_tqdm=False)])
    assert not calls
    np.testing.assert_array_equal(found[0], found[1])


@pytest.fixture
def configuration():
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = type("ModelConfig", (), {"dtype": None})()
    with set_current_vllm_config(config):
        yield config


def layer(head_size=64, **settings):
    from lean_attention._vllm_cpu import LeanCpuImpl

    return LeanCpuImpl(4, head_size, 0.125, 2, **settings)


def test_a_layer_that_is_not_understood_is_refused_by_name_when_it_is_built(configuration, monkeypatch):
    assert layer().lean is not None and layer().lean.writes
    assert not layer(kv_sharing_target_layer_name="model.layers.0").lean.writes
    for attn_type in ("encoder", "encoder_only", "encoder_decoder"):
        assert layer(attn_type=attn_type).lean is None
    for name, settings in {
        "kv_cache_dtype = 'int8_per_token_head'": dict(kv_cache_dtype="int8_per_token_head"),
        "head_size = 640": dict(head_size=640),
        "chunk_lookback": dict(chunk_lookback=3),
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            layer(**settings)
    monkeypatch.setattr(configuration.parallel_config, "decode_context_parallel_size", 2)
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size = 2"):
        layer()
    monkeypatch.setattr(configuration.parallel_config, "decode_context_parallel_size", 1)
    configuration.kv_transfer_config = object()
    with pytest.raises(NotImplementedError, match="kv_transfer_config"):
        layer()


def test_keys_that_a_model_stores_outside_of_a_step_are_stored(configuration):
    """As DFlash's draft model does with those of its context."""
    key, value = torch.randn(2, 3, 2, 64)
    cache = torch.zeros(4, 2, 16, 128)
    ours = layer()
    ours.do_kv_cache_update(types.SimpleNamespace(layer_name="draft"), key, value, cache, torch.tensor([17, -1, 40]))
    k, v = _vllm_call.halves(cache)
    for pool, given in ((k, key), (v, value)):
        assert torch.equal(pool[1, :, 1], given[0]) and torch.equal(pool[2, :, 8], given[2])
        assert pool.count_nonzero() == 2 * given[0].numel()


def test_a_layer_that_vllm_changed_is_refused_or_handed_over(configuration):
    """What vLLM derives from a backend changes the steps its layers get; on the CPU nobody else reads their cache."""
    from lean_attention._vllm_cpu import LeanCpuImpl

    derived = type("BlockPoolingImpl", (LeanCpuImpl,), {"__module__": "vllm.model_executor.models.whisper_causal"})
    with pytest.raises(NotImplementedError, match="BlockPoolingImpl: changes what its layer gets"):
        derived(4, 64, 0.125, 2)
    assert derived(4, 64, 0.125, 2, attn_type="encoder_decoder").lean is None


def test_a_step_that_is_not_understood_is_refused_by_name():
    from lean_attention._vllm_cpu import LeanCpuBuilder

    class Step:
        num_reqs = num_actual_tokens = max_query_len = max_seq_len = 1
        query_start_loc = torch.tensor([0, 1])
        seq_lens = slot_mapping = torch.tensor([1])
        block_table_tensor = torch.tensor([[0]])
        causal = True

    builder = object.__new__(LeanCpuBuilder)
    builder.is_ours = True
    assert builder.build(0, Step()).causal
    one = torch.tensor([1])
    for name, value in {"mm_req_doc_ranges": {0: [(0, 1)]}, "rswa_prefix_lens": one, "causal": one > 0}.items():
        step = Step()
        setattr(step, name, value)
        with pytest.raises(NotImplementedError, match=name):
            builder.build(0, step)


def test_the_variable_decides_and_other_versions_are_refused(monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose(ours=True)
    assert AttentionBackendEnum.CPU_ATTN.get_class().__name__ == "LeanCpuBackend"
    choose(ours=False)
    assert AttentionBackendEnum.CPU_ATTN.get_class().__name__ == "CPUAttentionBackend"
    monkeypatch.delenv("LEAN_ATTENTION_VLLM")
    plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()  # on the CPU it must be asked for
    monkeypatch.setenv("LEAN_ATTENTION_VLLM", "yes")
    with pytest.raises(ValueError, match="LEAN_ATTENTION_VLLM = 'yes'"):
        plugin.register()
    monkeypatch.setenv("LEAN_ATTENTION_VLLM", "1")
    monkeypatch.setattr("vllm.__version__", "0.19.1")
    with pytest.raises(RuntimeError, match=r"vllm 0\.19\.1 is not served"):
        plugin.register()
    monkeypatch.delenv("LEAN_ATTENTION_VLLM")
    plugin.register()  # nobody asked for it: a line in the log, and vLLM as it was
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setenv("LEAN_ATTENTION_VLLM", "1")
    monkeypatch.setattr("vllm.__version__", "0.12.0")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)  # as there: no such module
    with pytest.raises(RuntimeError, match=r"vllm 0\.12\.0 is not served"):
        plugin.register()


@pytest.fixture
def server(models):
    """vLLM's server in processes of its own, which find the plug-in by its entry point; yields (URL, model, log, process id)."""
    folder = models("llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = pathlib.Path(folder).parent / "server.log"
    environment = {**os.environ, "LEAN_ATTENTION_VLLM": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1", folder, log, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(process, url, log):
    for _ in range(START_S):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no answer after {START_S} s: {log.read_text()[-3000:]}")


def test_a_server_streams_the_engines_tokens(server, models):
    """Four clients at once, by OpenAI's protocol; and the load scripts of examples/serve."""
    import openai

    url, model, log, process = server
    given = prompts((40, 7, 150, 90), seed=3)
    with engine(models("llama"), ours=False) as llm:
        theirs = [tokens for tokens, _ in generate(llm, given, tokens=16)]
    client = openai.OpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)

    def streamed(prompt):
        pieces = client.completions.create(
            model=model, prompt=prompt, max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return [piece.choices[0].text for piece in pieces if piece.choices]  # on a busy machine one piece holds several tokens

    with concurrent.futures.ThreadPoolExecutor(len(given)) as pool:
        answers = list(pool.map(streamed, given))
    assert [[int(word) for word in re.findall(r"t(\d+)", "".join(pieces))] for pieces in answers] == theirs
    assert "in the place of CPU_ATTN" in log.read_text()
    load = pathlib.Path(__file__).parents[2] / "examples" / "serve" / "load.py"
    words = " ".join(f"t{i}" for i in range(3, 40))
    command = [sys.executable, load, "--url", url, "--loads", "8,16", "--requests", "6", "--new-tokens", "5", "--words", words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert "tokens/s" in header and [row.split()[0] for row in rows] == ["8", "16"] and {row.split()[-1] for row in rows} == {"0"}
    names = [f"a={url}", f"b={url}"]  # the same server twice
    command = [sys.executable, load.with_name("turns.py"), *names, "--turns", "2", "--load", "8", "--requests", "3", "--words", words]
    command += ["--new-tokens", "5", "--processes", str(process), str(process)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:5]] == ["a", "b", "b", "a"]
    assert len(re.findall(r"^a / b, .*: [0-9.]+ \([0-9.]+ to [0-9.]+\)$", done.stdout, re.MULTILINE)) == 4


def test_a_load_counts_tokens_and_not_pieces(monkeypatch):
    """Pieces of one, three and two tokens, as a server in a hurry sends them; and servers that do not say how many there are."""
    folder = pathlib.Path(__file__).parents[2] / "examples" / "serve"
    monkeypatch.syspath_prepend(folder)
    load = importlib.import_module("load")

    async def pieces(said):
        for tokens in said:
            usage = tokens and types.SimpleNamespace(completion_tokens=tokens)
            yield types.SimpleNamespace(choices=["text"], usage=usage)

    async def create(**asked):
        return pieces(asked["model"])

    client = types.SimpleNamespace(completions=types.SimpleNamespace(create=create))
    clock = iter((10.0, 10.5, 10.8, 10.9))
    monkeypatch.setattr(load.time, "perf_counter", lambda: next(clock, 11.0))
    request = load.Request(1.0, 3)
    asyncio.run(load.stream(client, (1, 4, 6), "", 6, request, 10.0))
    assert request.tokens == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.85, 0.9]) and not request.error
    assert request.gaps_ms() == pytest.approx([100, 100, 100, 50, 50])
    for said, words in (((None, None), "2 pieces and no word"), ((None, 2, None), "3 pieces and 2 tokens")):
        request = load.Request(1.0, 3)
        asyncio.run(load.stream(client, said, "", 6, request, 10.0))
        assert request.error.startswith(words)
    row = load.row(1.0, [request], 1.0)
    assert row.split()[1] == "0.0" and row.split()[-1] == "1"  # what was counted wrongly is no rate


def test_on_cuda_a_step_goes_to_the_kernel_that_is_made_for_it(monkeypatch):
    """Which steps are taken, and that the layer reads FlashAttention's cache; the tensors lie on the CPU here."""
    from lean_attention import _vllm_cuda as cuda

    builder = object.__new__(cuda.LeanCudaBuilder)
    step = types.SimpleNamespace(max_query_len=16, num_actual_tokens=40, causal=True)
    assert builder.takes(step)
    step.max_query_len = 17
    assert not builder.takes(step)
    monkeypatch.setattr(cuda.envs, "VLLM_BATCH_INVARIANT", True)
    assert builder.takes(step)
    step.causal = torch.tensor([True])
    assert not builder.takes(step)
    backend = cuda.LeanCudaBackend
    widest = _core.WIDEST_CUDA_HEAD
    assert all(backend.supports_head_size(size) for size in (64, widest - 8, widest))
    assert not any(backend.supports_head_size(size) for size in (100, widest + 8))
    assert backend.supports_dcp()

    impl = object.__new__(cuda.LeanCudaImpl)
    impl.lean, impl._bound = _vllm_call.PagedLayer(scale=0.1), (None, None)
    impl._pages_of = impl.reads_packed
    cache, query = torch.randn(4, 2, 16, 2 * 64).bfloat16(), torch.randn(1, 4, 64).bfloat16()
    table, length = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([23], dtype=torch.int32)
    batch = _vllm_call.Batch(1, 1, torch.tensor([0, 1], dtype=torch.int32), 23, length, table, None)
    out = torch.empty_like(query)
    impl.forward(None, query, None, None, cache, batch, out)
    k, v = (torch.cat([cache[2], cache[0]], 1)[:, :23, part].float() for part in (slice(0, 64), slice(64, 128)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).float()[None], k[None], v[None], scale=0.1, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), atol=0.02, rtol=0.02)

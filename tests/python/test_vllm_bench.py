"""bench/vllm_engine.py and bench/vllm_serve.py: which of an engine's steps are counted, on an engine that only schedules."""

import importlib.util
import pathlib
import sys
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import vllm_engine  # noqa: E402


class Scheduler:
    """Steps of at most `step_tokens`: a token for each request that decodes, then prompts in the order in which they came.
    `room` is how many requests it holds at once. `attention` is called in each step with how many requests decode."""

    def __init__(self, step_tokens, room=64, attention=lambda decoding: None):
        self.step_tokens, self.room, self.attention = step_tokens, room, attention
        self.waiting, self.running, self.time = [], [], 0

    def add_request(self, name, prompt, parameters):
        self.waiting.append(SimpleNamespace(name=name, prompt=len(prompt["prompt_token_ids"]), left=parameters.max_tokens, tokens=[]))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        decoding = list(self.running)
        self.time += 1
        self.attention(len(decoding))
        budget, got = self.step_tokens - len(decoding), list(decoding)
        while self.waiting and budget and len(self.running) < self.room:
            first = self.waiting[0]
            read = min(budget, first.prompt)
            first.prompt, budget = first.prompt - read, budget - read
            if first.prompt == 0:
                self.running.append(self.waiting.pop(0))
                got.append(first)
        for request in got:
            request.tokens.append(0)
            request.left -= 1
        self.running = [request for request in self.running if request.left]
        return [SimpleNamespace(request_id=r.name, finished=not r.left, outputs=[SimpleNamespace(token_ids=r.tokens)]) for r in got]


def submitted(engine, lengths, new):
    for i, length in enumerate(lengths):
        engine.add_request(str(i), {"prompt_token_ids": [0] * length}, SimpleNamespace(max_tokens=new))


@pytest.mark.parametrize("lengths", [(1000,), (1000,) * 8, (3, 5000, 40, 1200), (64,) * 33])
def test_steps_are_counted_in_which_all_requests_decode(lengths):
    decoding = []
    engine = Scheduler(200, attention=decoding.append)
    submitted(engine, lengths, vllm_engine.tokens_of_each(lengths, 6, 200))
    counted = vllm_engine.steps_of_all(engine, len(lengths), 6, lambda: decoding[-1])
    assert counted == [len(lengths)] * 6
    assert len(lengths) == 1 or decoding[-1] < len(lengths)  # the last steps are of a part of them


def test_an_engine_without_room_for_all_requests_is_refused():
    engine = Scheduler(200, room=3)
    submitted(engine, (64,) * 4, vllm_engine.tokens_of_each((64,) * 4, 6, 200))
    with pytest.raises(RuntimeError, match="0 steps in which all 4 requests decode, 8 are needed"):
        vllm_engine.steps_of_all(engine, 4, 6, lambda: 0)


def test_reading_prompts_is_timed_until_each_request_has_a_token(monkeypatch):
    engine = Scheduler(200)
    monkeypatch.setattr(vllm_engine, "submit", lambda llm, name, lengths, max_tokens: [
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": [0] * n}, SimpleNamespace(max_tokens=max_tokens)) for i, n in enumerate(lengths)
    ])  # fmt: skip
    monkeypatch.setattr(vllm_engine.time, "perf_counter", lambda: engine.time)
    monkeypatch.setattr(vllm_engine, "STEP_TOKENS", 200)
    tokens, seconds, read = vllm_engine.decode_steps(SimpleNamespace(llm_engine=engine), "4x500", 6)
    assert len(tokens) == 4 and seconds == [1] * 6
    assert read == 11  # 2,000 tokens by 200, and those of requests that decode beside them


def options_of(**given):
    chosen = dict(backends=["CUSTOM", "FLASH_ATTN"], kv_cache_dtype=["auto"], cudagraph_mode=["default"], no_compile=False, shapes=["1x1k", "8~1k"])
    return SimpleNamespace(**chosen | given)


def test_each_attention_runs_with_each_cache_and_each_mode_of_graphs():
    assert [str(each) for each in vllm_engine.variants_of(options_of())] == ["CUSTOM", "FLASH_ATTN"]
    names = [str(each) for each in vllm_engine.variants_of(options_of(kv_cache_dtype=["auto", "fp8"], cudagraph_mode=["default", "FULL"]))]
    assert names[:4] == ["CUSTOM", "FLASH_ATTN", "CUSTOM fp8", "FLASH_ATTN fp8"]
    assert names[4:] == ["CUSTOM FULL", "FLASH_ATTN FULL", "CUSTOM fp8 FULL", "FLASH_ATTN fp8 FULL"]


@pytest.mark.parametrize(
    "given, settings",
    [
        ({}, None),
        (dict(cudagraph_mode=["FULL"]), dict(cudagraph_mode="FULL")),
        (dict(no_compile=True), dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 8])),
        (dict(no_compile=True, cudagraph_mode=["FULL"]), dict(mode=0, cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 8])),
    ],
)
def test_the_engine_is_told_of_graphs(given, settings):
    assert vllm_engine.compilation(options_of(**given)) == ({} if settings is None else dict(compilation_config=settings))


def test_log_probabilities_of_prompts_are_compared_token_by_token():
    assert vllm_engine.mean_distance([-1.0, -2.0], [-1.5, -2.0]) == 0.25
    with pytest.raises(ValueError):
        vllm_engine.mean_distance([-1.0], [-1.5, -2.0])


def test_log_probabilities_are_compared_up_to_the_first_token_that_differs():
    mine = [[(1, -0.5), (2, -1.0), (3, -2.0)], [(7, -0.25)]]
    theirs = [[(1, -0.5), (2, -1.25), (4, -9.0)], [(7, -0.75)]]
    assert vllm_engine.distance(mine, theirs) == (3, 0.5)


def test_what_the_host_spends_is_added_up_for_a_step_and_a_call_within_another_once():
    class Builder:
        def build(self):
            return 7

    class Derived(Builder):
        def build(self):
            return super().build()

    class Inherits(Builder):
        pass

    before, parts = [dict(vars(cls)) for cls in (Builder, Derived, Inherits)], vllm_engine.HostParts()
    for cls in vllm_engine.classes_below(Builder):
        parts.watch("build", cls, "build")
    assert [cls().build() for cls in (Builder, Derived, Inherits)] == [7, 7, 7]
    seconds, calls = parts.end_step()["build"]
    assert calls == 3 and 0 < seconds < 1
    assert parts.end_step() == {"build": (0.0, 0)}
    parts.remove()
    assert [dict(vars(cls)) for cls in (Builder, Derived, Inherits)] == before


@pytest.mark.parametrize(
    "kernel, counted",
    [
        ("void lean::cuda::decode_kernel<...>", True),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...> > >", True),
        ("void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)", True),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", True),
        ("kernel_unified_attention_3d", True),
        ("void vllm::reshape_and_cache_flash_kernel<...>", False),
        ("void vllm::rms_norm_kernel<...>", False),
    ],
)
def test_kernels_of_attention_are_told_from_the_engines(kernel, counted):
    assert bool(vllm_engine.ATTENTION.search(kernel)) == counted


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm")
def test_attention_is_timed_in_steps_in_which_all_requests_decode():
    import vllm_serve

    class Implementation:
        def forward(self, decoding):
            watched.append(decoding)

        def do_kv_cache_update(self):
            pass

    watched: list = []
    engine = Scheduler(vllm_serve.STEP_TOKENS, attention=lambda decoding: Implementation().forward(decoding))
    batch, counted = 8, []
    end_step = vllm_serve.Stopwatch.end_step
    vllm_serve.Stopwatch.end_step = lambda self: end_step(self) and watched[-1]
    try:
        counted = vllm_serve.decode_steps(SimpleNamespace(llm_engine=engine), batch, 1024, 6, Implementation)
    finally:
        vllm_serve.Stopwatch.end_step = end_step
    assert counted == [batch] * 6
    assert watched[-1] < batch

"""bench/vllm_engine.py and bench/vllm_serve.py: which of an engine's steps are counted, on an engine that only schedules."""

import importlib.util
import pathlib
import sys
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import figure_data  # noqa: E402
import suite_data  # noqa: E402
import vllm_engine  # noqa: E402
import vllm_serve  # noqa: E402


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
        ("void lean::cuda::decode_kernel<(lean::cuda::Architecture)90, (lean::DType)2, 128>", True),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>", True),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<1>>", True),
        ("kernel_mha(unsigned int, float, float const*, Vec<__nv_bfloat16, 128u>*)", True),  # XQA's
        ("kernel_mha", True),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>", False),
        ("void vllm::scaled_fp8_quant_kernel_strided_group_shape<c10::BFloat16>", False),
        ("void other::kernel_mha_like<1>()", False),
    ],
)
def test_kernels_of_attention_are_told_from_the_engines(kernel, counted):
    assert bool(vllm_engine.ATTENTION.search(kernel)) == counted


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm")
def test_attention_is_timed_in_steps_in_which_all_requests_decode():
    class Implementation:
        def forward(self, decoding):
            watched.append(decoding)

        def do_kv_cache_update(self):
            pass

    watched: list = []
    forward = Implementation.forward
    engine = Scheduler(vllm_serve.STEP_TOKENS, attention=lambda decoding: Implementation().forward(decoding))
    requests = vllm_serve.Requests(SimpleNamespace(llm_engine=engine), "8x1k", 6, Implementation)
    read = requests.read()
    assert 0 < read.attention < read.whole
    for steps in (2, 4):
        found = requests.decode(steps)
        assert watched[-steps:] == [8] * steps
        assert len(found) == steps and all(0 < step.attention < step.whole for step in found)
    with pytest.raises(ValueError, match="steps = 1"):
        requests.decode(1)
    requests.end()
    assert watched[-1] < 8 and Implementation.forward is forward


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm")
def test_an_engine_without_room_for_all_requests_is_no_measurement():
    engine = Scheduler(vllm_serve.STEP_TOKENS, room=2)
    requests = vllm_serve.Requests(SimpleNamespace(llm_engine=engine), "3x1", 4, type("Nothing", (), {"forward": None, "do_kv_cache_update": None}))
    with pytest.raises(RuntimeError, match="not room"):
        requests.read()


def test_engines_take_turns_in_both_orders():
    told = []

    def engine_named(name):
        def tell(*command):
            told.append((name, *command))
            return [vllm_serve.Step(2.0, 1.0)] * command[1] if command[0] == "decode" else None

        return tell

    _, found = vllm_serve.measure({name: engine_named(name) for name in vllm_serve.ATTENTIONS}, "1x1k", turns=3, steps=2)
    assert [name for name, command, *_ in told if command == "decode"] == ["cpu_attn", "lean", "lean", "cpu_attn", "cpu_attn", "lean"]
    assert {tuple(command) for _, *command in told if command[0] == "begin"} == {("begin", "1x1k", 9)}
    assert all(len(turns) == 3 and all(len(turn) == 2 for turn in turns) for turns in found.values())


def checks_of(*probabilities):
    """Functions that tell engines, each of which decodes the same tokens after prompts whose tokens are as probable as that."""
    tokens = [[(1, -0.5)] * vllm_engine.CHECKED_TOKENS] * len(vllm_engine.CHECKED_LENGTHS)
    return {name: lambda command, each=each: (tokens, each) for name, each in zip(vllm_serve.ATTENTIONS, probabilities)}


def test_engines_that_disagree_are_not_measured():
    near = [-1.0 - vllm_serve.FURTHEST / 2, -2.0]
    assert vllm_serve.agreement(checks_of([-1.0, -2.0], near)).startswith("64/64 tokens are the same, log-probabilities up to there within 0,")
    for far in (-1.0 - 3 * vllm_serve.FURTHEST, float("nan")):
        with pytest.raises(RuntimeError, match="too far"):
            vllm_serve.agreement(checks_of([-1.0, -2.0], [far, -2.0]))


def test_a_line_has_each_step_and_what_is_made_of_them():
    turns = [[vllm_serve.Step(2.0, 1.0), vllm_serve.Step(4.0, 1.5)], [vllm_serve.Step(2.0, 0.5), vllm_serve.Step(2.0, 1.0)]]
    line = vllm_serve.line_of("lean", "8x1k", vllm_serve.Step(9.0, 6.0), turns)
    assert line["step_s"] == [2.0, 4.0, 2.0, 2.0] and line["attention_step_s"] == [[1.0, 1.5], [0.5, 1.0]]
    assert (line["attention_s"], line["tokens_per_s"], line["prompts_s"], line["prompts_attention_s"]) == (1.0, 4.0, 9.0, 6.0)


# --- tables of docs/vllm.md ----------------------------------------------------------------------------------------------


def engine_line(attention, attention_s, shape="1x1k", run="a", kernels=("lean::decode_kernel",), **more):
    host = dict(build=[[1e-5, 1]] * 3)
    kernels = [dict(name=name) for name in kernels]
    return dict(shape=shape, attention=attention, attention_s=attention_s, step_s=[2e-3] * 3, run=run, kernels=kernels, host_s=host) | more


def rows_in(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]


def tables_of(monkeypatch, lines):
    monkeypatch.setattr(figure_data, "lines", lambda name: lines)
    return rows_in(figure_data.engine_table("any")), rows_in(figure_data.engine_steps_table("any"))


def test_a_ratio_is_of_lines_of_one_run_and_flashinfer_is_told_by_its_kernels(monkeypatch):
    kernels, steps = tables_of(monkeypatch, [
        engine_line("CUSTOM", 1e-3), engine_line("FLASH_ATTN", 2e-3), engine_line("FLASHINFER", 4e-3, kernels=["kernel_mha(int)"]),
        engine_line("CUSTOM", 3e-3, run="b"), engine_line("FLASHINFER", 6e-3, run="b", kernels=["void flashinfer::Kernel<1>"]),
    ])  # fmt: skip
    assert kernels[0] == ["batch x context", "lean, ms", "FlashAttention-3, ms (lean / it)", "XQA, ms (lean / it)", "FlashInfer, ms (lean / it)"]
    assert kernels[2:] == [["1 x 1k", "1.000", "2.000 (0.50)", "4.000 (0.25)", "6.000 (0.50)"]]
    assert steps[2:] == [["1 x 1k", *["2.00 (10)"] * 4]]


def test_rows_are_by_cache_then_graphs_then_shape_and_those_of_a_run_that_was_cut_stay(monkeypatch):
    kernels, steps = tables_of(monkeypatch, [
        engine_line("CUSTOM", 3e-3, run="c", cache="fp8_e5m2"), engine_line("CUSTOM", 2e-3, run="b", graphs="FULL"),
        engine_line("CUSTOM", 1e-3, shape="8x1k"), engine_line("CUSTOM", None, kernels=[], host_s=None),
        engine_line("FLASHINFER", None, kernels=[]),
    ])  # fmt: skip
    assert kernels[0] == ["batch x context", "cache", "graphs", "lean, ms"]
    assert kernels[2:] == [
        ["8 x 1k", "bf16", "decode", "1.000"],
        ["1 x 1k", "bf16", "FULL", "2.000"],
        ["1 x 1k", "E5M2", "decode", "3.000"],
    ]
    assert steps[2:] == [
        ["1 x 1k", "bf16", "decode", "2.00"],  # and not FLASHINFER, whose kernels nobody saw
        ["8 x 1k", "bf16", "decode", "2.00 (10)"],
        ["1 x 1k", "bf16", "FULL", "2.00 (10)"],
        ["1 x 1k", "E5M2", "decode", "2.00 (10)"],
    ]


def test_flashinfer_without_kernels_is_what_other_shapes_of_its_run_are(monkeypatch):
    _, steps = tables_of(monkeypatch, [
        engine_line("FLASHINFER", 1e-3, kernels=["kernel_mha"]), engine_line("FLASHINFER", None, shape="8x1k", kernels=[]),
    ])  # fmt: skip
    assert steps[0][1:] == ["XQA, ms (described in, us)"] and [row[0] for row in steps[2:]] == ["1 x 1k", "8 x 1k"]


def test_what_is_shown_of_a_shape_has_the_quartiles_of_its_turns(capsys):
    def line(attention, *turns):
        read = vllm_serve.Step(3.0, 2.0)
        return dict(shape="4x1k", layers=2) | vllm_serve.line_of(attention, "4x1k", read, [[vllm_serve.Step(4e-3, 1e-3 * one)] for one in turns])

    vllm_serve.show(line("cpu_attn", 1, 2, 3, 4, 5), line("lean", 1, 1, 1, 1, 1))
    shown = capsys.readouterr().out.split()
    assert " ".join(shown) == "4x1k 1500 ( 75 %) 500 ( 25 %) 3.00 (2.00 to 4.00) 2.00 2.00 (1.00) 1000.0 1000.0"


def test_a_ratio_of_engines_on_a_cpu_is_of_turns_that_are_neighbours():
    def line(attention, turns, prompts):
        return dict(model="thin", layers=2, shape="32~1k", attention=attention, attention_s=4e-4, step_s=[1e-3] * 3,
                    attention_step_s=turns, prompts_attention_s=prompts)  # fmt: skip

    slow_for_a_while = line("cpu_attn", [[4e-4] * 2, [9e-4] * 2, [4e-4] * 2], 2.0)
    head, table = suite_data.engines_on_a_cpu_table([slow_for_a_while, line("lean", [[2e-4] * 2, [4.5e-4] * 2, [1e-4] * 2], 4.0)], str)
    assert head[-2:] == ["CPU_ATTN / lean (quartiles of turns)", "prompts, CPU_ATTN / lean"]
    assert table == [["thin", "32~1k", "200", "40 %", "200", "40 %", "2.00 (2.00 to 3.00)", "0.50"]]

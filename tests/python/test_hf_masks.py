"""The registered mask function: the keys that sdpa_mask() names, as two numbers exactly where these say it."""

import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")

import test_hf  # noqa: E402
from test_hf import CACHE, VERSION, Calls, LeanStaticCache, generated, model_of, prompts  # noqa: E402
from transformers import masking_utils  # noqa: E402

from lean_attention import _hf_masks  # noqa: E402
from lean_attention._hf_masks import KeyRanges, attention_mask, ranges_of  # noqa: E402

_one_thread = test_hf._one_thread
needs_5 = pytest.mark.skipif(VERSION < (5, 0), reason="transformers below 5: cache_position; experts that do not compile")


def mask_of(padding, offset, window):
    function = masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    places = dict(q_length=1, kv_length=padding.shape[1], q_offset=offset, mask_function=function, attention_mask=padding)
    return [
        make(padding.shape[0], device=torch.device("cpu"), config=None, allow_is_causal_skip=False, **places)
        for make in (attention_mask, masking_utils.sdpa_mask)
    ]


@needs_5
@pytest.mark.parametrize("offset", [4, torch.tensor(4)], ids=["counted on the host", "counted on the device"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("asked", [True, False], ids=["the padding is looked at", "it cannot be"])
def test_key_ranges_of_every_padding(offset, window, asked, monkeypatch):
    """Of five keys and one query: left padding, and nothing else, is two numbers, which name just the keys that count."""
    monkeypatch.setattr(_hf_masks, "may_wait_for", lambda tensor: asked)
    keys = 5
    for bits in range(1, 2**keys):
        seen = [bool(bits >> key & 1) for key in range(keys)]
        mask, expected = mask_of(torch.tensor([seen]), offset, window)
        ranges = ranges_of(mask)
        assert torch.equal(mask & True, expected), seen
        first = max(seen.index(True), keys - window if window else 0)
        if seen == sorted(seen) or not asked:
            assert (ranges.starts.tolist(), ranges.ends.tolist(), ranges.whole) == ([first], [keys], asked), seen
        else:
            assert ranges is None, seen


@needs_5
def test_a_device_is_asked_once_a_mask_and_never_in_a_graph(monkeypatch):
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"))
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        assert _hf_masks.may_wait_for(on_gpu) is not capturing
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: [x, asked.append(_hf_masks.may_wait_for(x))][0])(*(asked := [torch.ones(1)]))
    assert asked[1:] == [False]
    questions = []
    monkeypatch.setattr(_hf_masks, "_is_padded_left", lambda *_: questions.append(1) or True)
    mask_of(torch.tensor([[False, True, True]]), 2, 0)
    assert len(questions) == 1


def chat(implementation, device="cpu", dtype=torch.float32):
    """A batch's second turn: right padding of the first one is a hole now. Logits of its prompt and of two steps."""
    model = model_of("llama", implementation, dtype).to(device)
    torch.manual_seed(1)
    ids = torch.randint(2, 97, (2, 10)).to(device)
    mask = torch.tensor([[1] * 10, [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]]).to(device)
    cache, logits = None, []
    for begin, end in ((0, 5), (5, 8), (8, 9), (9, 10)):
        position = (mask.cumsum(1) - 1)[:, begin:end]
        with torch.no_grad():
            step = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=position, use_cache=True, **{CACHE: cache})
        cache = step[CACHE]
        logits.append(step.logits[:, -1].float())
    return torch.stack(logits[1:])


@pytest.mark.parametrize("asked", [True, False], ids=["the padding is looked at", "it cannot be"])
def test_holes_are_read_as_they_are(asked, monkeypatch):
    expected = chat("eager")
    calls = Calls(monkeypatch)
    monkeypatch.setattr(_hf_masks, "may_wait_for", lambda tensor: asked)
    torch.testing.assert_close(chat("lean_attention"), expected)
    assert calls.count == 4 * 3  # a call for each layer of all passes


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_tokens_where_the_padding_cannot_be_looked_at(name, monkeypatch):
    inputs = prompts(3, True)
    expected = generated(model_of(name, "eager"), inputs)
    monkeypatch.setattr(_hf_masks, "may_wait_for", lambda tensor: False)
    assert torch.equal(generated(model_of(name, "lean_attention"), inputs), expected)


def test_the_mask_is_sdpas_for_who_reads_it():
    """DeepSeek-V3.2 and Doge index it and ask for its type; nobody but the library knows of the two numbers."""
    starts, ends = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    mask = KeyRanges(starts, ends, 2, 2, 6)
    expected = [[[[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]], [[[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]]]
    assert mask.dtype == torch.bool and mask.shape == (2, 1, 2, 6) and mask.device == starts.device
    assert (mask & True).int().tolist() == expected
    assert torch.where(mask[:, :, :, :4], 0.0, -1.0).shape == (2, 1, 2, 4)
    assert ranges_of(mask).starts is starts and ranges_of(mask & True) is None
    assert ranges_of(mask[:, :, 1:]).starts.tolist() == [3, 2] and ranges_of(mask[:, :, :1]) is None
    assert (mask[:, :, 1:] & True).int().tolist() == [[[expected[b][0][1]]] for b in (0, 1)]
    assert ranges_of(torch.ones(2, 1, 1, 2, dtype=torch.int32)) is None


@needs_5
@pytest.mark.parametrize("asked", [True, False])
def test_a_model_that_wants_to_see_its_mask_gets_one(asked):
    """T5Gemma-2 puts another beside it, DeepSeek-V3.2 indexes it; where a single query sees every key, too."""
    config = transformers.LlamaConfig(**test_hf.GQA)
    places = dict(q_length=1, kv_length=5, q_offset=4, device=torch.device("cpu"), config=config, allow_is_causal_skip=not asked)
    mask = attention_mask(2, **places)
    assert (mask & True).tolist() == [[[[True] * 5]]] * 2 if asked else mask is None


def gemma4(implementation):
    """Three layers of keys of their own, and three that read theirs, of the last queries alone."""
    config = transformers.Gemma4TextConfig(
        **test_hf.SMALL | dict(num_hidden_layers=6), num_key_value_heads=2, head_dim=16, global_head_dim=16, num_kv_shared_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, sliding_window=8,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=97,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="a transformers without Gemma-4")
@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("tokens", [7, 24], ids=["within the window", "beyond it"])
@pytest.mark.parametrize("cache", [None, "dynamic", "static", "lean"])
def test_layers_that_get_the_last_queries_alone(kept, tokens, cache):
    ids, logits = prompts(2, False, tokens)["input_ids"], []
    for implementation in ("eager", "lean_attention"):
        model = gemma4(implementation)
        caches = {
            "dynamic": lambda: transformers.DynamicCache(config=model.config),
            "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=40),
            "lean": lambda: LeanStaticCache(model.config, max_cache_len=40),
        }
        arguments = {CACHE: caches[cache]()} if cache else dict(use_cache=False)
        with torch.no_grad():
            logits.append(model(input_ids=ids, logits_to_keep=kept, **arguments).logits)
    torch.testing.assert_close(*logits)


@needs_5
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("keys", [7, 12], ids=["of the tokens there are", "of a static cache"])
def test_the_last_queries_of_a_mask_that_is_causal_are_two_numbers_too(keys, window):
    """No mask of n_q x n_kv is made: PyTorch's attention gets none, and the library reads the numbers."""
    function = masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    places = dict(q_length=7, kv_length=keys, q_offset=0, mask_function=function, device=torch.device("cpu"))
    expected = masking_utils.sdpa_mask(2, allow_is_causal_skip=False, **places)
    assert attention_mask(2, config=None, **places) is None
    mask = attention_mask(2, config=types.SimpleNamespace(num_kv_shared_layers=3), **places)
    assert _hf_masks.without_plain(mask) is _hf_masks.without_plain(mask[:, :, 0:]) is None
    for queries in (1, 3):
        last = mask[:, :, -queries:]
        assert ranges_of(last).ends.tolist() == [7, 7] and _hf_masks.without_plain(last) is last
        assert torch.equal(last & True, expected[:, :, -queries:])
    assert mask.made is None
    assert torch.equal(mask & True, expected) and torch.equal(mask[:, :, :2], expected[:, :, :2])


def doge():
    config = transformers.DogeConfig(**test_hf.GQA, keep_window_size=4)
    return config


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_that_indexes_its_mask(cache, monkeypatch):
    monkeypatch.setattr(test_hf, "_config", lambda name: doge())
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    for padded in (False, True):
        inputs = prompts(3, padded)
        expected = generated(model_of("doge", "sdpa"), inputs, **arguments)
        assert torch.equal(generated(model_of("doge", "lean_attention"), inputs, **arguments), expected)


# --- while torch.compile traces --------------------------------------------------------------------------------------


def compiled_and_eager(model, **inputs):
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(use_cache=False, **inputs)[0]
        return torch.compile(model, fullgraph=True, backend="eager")(use_cache=False, **inputs)[0], expected


@pytest.mark.parametrize("name", ["gemma2", "llama", "mistral"])
@pytest.mark.parametrize("pattern", ["rows packed by their positions", "seen on both sides", "plain", "padded"])
def test_patterns_that_cannot_be_told_while_compiling_are_not_guessed(name, pattern):
    model = model_of(name, "lean_attention")
    inputs = dict(input_ids=torch.arange(3, 33)[None])
    if pattern == "rows packed by their positions":
        inputs["position_ids"] = torch.cat([torch.arange(12), torch.arange(18)])[None]
    elif pattern == "seen on both sides":
        model.config.is_causal = False
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    elif pattern == "padded":
        inputs["attention_mask"] = torch.tensor([[0] * 4 + [1] * 26])
    compiled, expected = compiled_and_eager(model, **inputs)
    eager = model_of(name, "eager")
    if pattern == "seen on both sides":
        eager.config.is_causal = False
    with torch.no_grad():
        stock = eager(use_cache=False, **inputs)[0]
    begin = 4 if pattern == "padded" else 0
    torch.testing.assert_close(expected[:, begin:], stock[:, begin:], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(compiled[:, begin:], stock[:, begin:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", pytest.param("gpt_oss", marks=needs_5)])
def test_a_compiled_prompt_of_another_length(name):
    model = model_of(name, "lean_attention")
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for tokens in (9, 13, 21):
            ids = torch.arange(3, 3 + tokens)[None]
            torch.testing.assert_close(step(ids, use_cache=False)[0], model(ids, use_cache=False)[0])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_export_with_a_dynamic_length(name):
    model = model_of(name, "lean_attention")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        program = torch.export.export(Logits(), (ids,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
        for tokens in (11, 23):
            ids = torch.arange(3, 3 + tokens)[None]
            torch.testing.assert_close(program.module()(ids), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
def test_a_mask_is_an_input_of_a_compiled_step(padded):
    """generate() makes the masks of a compiled step before it calls it."""
    model = model_of("mistral", "lean_attention")
    inputs = prompts(2, padded)
    expected = generated(model, inputs)
    torch._dynamo.reset()
    forward = model.forward
    model.forward = torch.compile(forward, fullgraph=False, backend="aot_eager")
    cache = LeanStaticCache(model.config, max_cache_len=40)
    assert torch.equal(generated(model, inputs, disable_compile=True, **{CACHE: cache}), expected)


@pytest.mark.parametrize(
    "sizes, head_dim",
    [(dict(head_dim=16, hidden_size=64, num_attention_heads=2), 16), (dict(hidden_size=640, num_attention_heads=8), 80),
     (dict(head_dim=None, hidden_size=[64, 32], num_attention_heads=2), None), (dict(hidden_size=64, num_attention_heads=0), None), ({}, None)],
)  # fmt: skip
def test_head_dims_that_configurations_say(sizes, head_dim):
    assert _hf_masks._head_dim_of(types.SimpleNamespace(**sizes)) == head_dim

"""attn_implementation="lean_attention": the same tokens as eager, for small random models of each kind."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.53")

from conftest import needs  # noqa: E402

import lean_attention.hf  # noqa: E402

lean_attention.hf.register()


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GQA = dict(SMALL, num_key_value_heads=2)


def _config(name):
    if name == "opt":
        sizes = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
        return transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64)
    if name == "gpt_oss":
        return transformers.GptOssConfig(**GQA, head_dim=16, num_local_experts=2, num_experts_per_tok=2, sliding_window=8)
    return {
        "llama": lambda: transformers.LlamaConfig(**GQA),
        "llama_64": lambda: transformers.LlamaConfig(**dict(GQA, hidden_size=256)),  # head dim 64
        "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=8),
        "phi3": lambda: transformers.Phi3Config(**GQA),
        "phi3_window": lambda: transformers.Phi3Config(**GQA, sliding_window=8),
        "qwen2": lambda: transformers.Qwen2Config(**GQA),
        "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=16),
        "gemma2": lambda: transformers.Gemma2Config(**GQA, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0, tie_word_embeddings=False),
    }[name]()


NAMES = ["opt", "llama", "mistral", "phi3", "phi3_window", "qwen2", "qwen3", "gemma2", "gpt_oss"]
needs_gpt_oss = pytest.mark.skipif(not hasattr(transformers, "GptOssConfig"), reason="transformers below 4.55")
MODELS = [pytest.param(name, marks=needs_gpt_oss) if name == "gpt_oss" else name for name in NAMES]


def model_of(name, implementation, dtype=torch.float32):
    torch.manual_seed(0)
    config = _config(name)
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # a spread that makes the next token depend on the keys
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model.to(dtype).eval()


def prompts(batch, padded, tokens=11):
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(2, 97, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for b in range(1, batch):
            ids[b, : 3 * b], mask[b, : 3 * b] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


def generated(model, inputs, **arguments):
    torch.manual_seed(0)
    return model.generate(**inputs, max_new_tokens=12, do_sample=False, **arguments)


class Calls:
    """Counts what the library computes."""

    def __init__(self, monkeypatch):
        self.count = 0
        original = lean_attention._accepts.decode

        def counted(*arguments, **keywords):
            result = original(*arguments, **keywords)
            self.count += 1
            return result

        monkeypatch.setattr(lean_attention._accepts, "decode", counted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_same_tokens_as_eager(name, padded, cache):
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    inputs = prompts(3, padded)
    expected = generated(model_of(name, "eager"), inputs, **arguments)
    assert len(set(expected[:, 11:].flatten().tolist())) > 6  # a model that repeats itself would prove nothing
    assert torch.equal(generated(model_of(name, "lean_attention"), inputs, **arguments), expected)


@pytest.mark.parametrize("name", ["opt", "llama", "mistral", "gemma2"])
def test_beam_search(name):
    inputs = prompts(2, True)
    expected = generated(model_of(name, "eager"), inputs, num_beams=3)
    assert torch.equal(generated(model_of(name, "lean_attention"), inputs, num_beams=3), expected)


@pytest.mark.parametrize(
    "name, passes",
    [
        ("llama", 11),  # every pass after the first
        ("mistral", 11),
        ("phi3_window", 11),
        pytest.param("gemma2", 12, marks=needs("softcap", "window")),  # and the first, where PyTorch has no softcap
        pytest.param("gpt_oss", 12, marks=[needs("sinks", "window"), needs_gpt_oss]),
    ],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_decode_step_is_the_librarys(name, passes, cache, monkeypatch):
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    calls = Calls(monkeypatch)
    generated(model_of(name, "lean_attention"), prompts(3, True), **arguments)
    assert calls.count == 3 * passes  # a call for each layer


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_single_prompt_token(name):
    inputs = prompts(2, False, tokens=1)
    expected = generated(model_of(name, "eager"), inputs)
    assert torch.equal(generated(model_of(name, "lean_attention"), inputs), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
def test_lean_static_cache(name, padded):
    try:
        from lean_attention.hf import LeanStaticCache
    except ImportError:
        pytest.skip("transformers below 4.56")
    inputs = prompts(3, padded)
    expected = generated(model_of(name, "eager"), inputs)
    model = model_of(name, "lean_attention")
    cache = LeanStaticCache(model.config, max_cache_len=40)
    tokens = generated(model, inputs, past_key_values=cache, disable_compile=True)
    assert torch.equal(tokens, expected)
    assert not any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    assert all(layer.keys.shape[2] == 40 for layer in cache.layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "phi3_window", "gemma2"])
def test_teacher_forced_logits_in_16_bits(name, dtype):
    """Not farther from the fp32 model than 2 times what eager attention in the same type is."""
    inputs = prompts(2, True)
    reference = model_of(name, "eager")
    tokens = generated(reference, inputs)

    def logits(model):
        cache, steps, mask = None, [], inputs["attention_mask"]
        for begin, end in [(0, 11)] + [(i, i + 1) for i in range(11, 22)]:
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, end - 11, dtype=torch.long)], 1)
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            with torch.no_grad():
                step = model(tokens[:, begin:end], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits[:, -1].float())
        return torch.stack(steps)

    exact = logits(reference)
    eager, ours = (logits(model_of(name, implementation, dtype)) for implementation in ("eager", "lean_attention"))
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()


def test_right_padding_in_a_decode_step_is_still_right():
    """A mask with holes is not two numbers."""
    models = [model_of("llama", implementation) for implementation in ("eager", "lean_attention")]
    ids = torch.randint(2, 97, (2, 6))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 1]])
    results = []
    for model in models:
        with torch.no_grad():
            first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
            results.append(model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("offset", [4, torch.tensor(4)], ids=["counted on the host", "counted on the device"])
@pytest.mark.parametrize("window", [0, 3])
def test_key_ranges_of_every_padding(offset, window):
    """Of five keys and one query: left padding, and nothing else, is two numbers, which name just the keys that count."""
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers below 5 names places by cache_position")
    function, keys = lean_attention.hf.causal_mask_function, 5
    if window:
        function = lean_attention.hf.and_masks(lean_attention.hf.sliding_window_overlay(window), function)
    for bits in range(1, 2**keys):
        seen = [bool(bits >> key & 1) for key in range(keys)]
        result = lean_attention.hf.attention_mask(
            1, q_length=1, kv_length=keys, q_offset=offset, mask_function=function, attention_mask=torch.tensor([seen]),
            device=torch.device("cpu"), config=None,
        )  # fmt: skip
        if seen == sorted(seen):
            first = max(seen.index(True), keys - window if window else 0)
            assert result.dtype == torch.int32 and result.tolist() == [[[[first, keys]]]], seen
        else:
            assert result is None or result.dtype == torch.bool, seen


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_continuous_batching(name):
    """generate_batch(): the tokens of the paged eager implementation, for prompts of uneven length."""
    if lean_attention.hf.PAGED_NAME not in transformers.AttentionInterface().valid_keys():
        pytest.skip("transformers below 5.23")
    pytest.importorskip("psutil")  # what Transformers asks how much memory a CPU has
    arguments = dict(
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16),  # by default most of the memory
        progress_bar=False,
    )
    tokens = []
    for implementation in ("paged|eager", "paged|lean_flash"):
        model = model_of(name, "eager")
        model.set_attn_implementation(implementation)
        result = model.generate_batch(inputs=[[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], list(range(20, 50))], **arguments)
        tokens.append([result[key].generated_tokens for key in sorted(result)])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3


def test_training_falls_back():
    model = model_of("llama", "lean_attention").train()
    ids = torch.randint(2, 97, (2, 7))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_decode_step_is_one_graph(name):
    try:
        from lean_attention.hf import LeanStaticCache
    except ImportError:
        pytest.skip("transformers below 4.56")
    torch._dynamo.reset()
    model = model_of(name, "lean_attention")
    inputs = prompts(2, False)
    expected = generated(model, inputs)

    nodes = []

    def backend(graph, _):
        nodes.append(sum("lean_attention.decode" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    cache = LeanStaticCache(model.config, max_cache_len=32)
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    with torch.no_grad():
        token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens = [token]
        for i in range(11):
            position = torch.full((2, 1), 11 + i)
            token = step(input_ids=token, past_key_values=cache, position_ids=position).logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected[:, 11:])
    assert nodes and all(count == 3 for count in nodes)  # a node for each layer


def test_what_the_library_does_not_do_is_pytorchs_in_a_compiled_graph():
    torch._dynamo.reset()
    model = model_of("llama", "lean_attention", torch.float64)
    inputs = prompts(2, False)

    def step(ids, cache):
        return model(input_ids=ids, past_key_values=cache).logits

    with torch.no_grad():
        caches = [model(**inputs, use_cache=True).past_key_values for _ in range(2)]
        ids = inputs["input_ids"][:, -1:]
        compiled = torch.compile(step, fullgraph=True, backend="eager")(ids, caches[0])
        torch.testing.assert_close(compiled, step(ids, caches[1]))

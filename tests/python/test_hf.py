"""attn_implementation="lean_attention": the same tokens as eager, for small random models of each kind."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.57")

from conftest import needs  # noqa: E402

import lean_attention.hf  # noqa: E402
from lean_attention import _hf_masks  # noqa: E402
from lean_attention.hf import LeanStaticCache, attention_forward  # noqa: E402

lean_attention.hf.register()
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"  # what a cache is passed and returned as


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


MODELS = ["opt", "llama", "mistral", "phi3", "phi3_window", "qwen2", "qwen3", "gemma2", "gpt_oss"]



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
    "name",
    [
        "llama",
        "mistral",
        "phi3_window",
        pytest.param("gemma2", marks=needs("softcap", "window")),
        pytest.param("gpt_oss", marks=needs("sinks", "window")),
    ],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_pass_is_the_librarys(name, cache, monkeypatch):
    """The prompt and eleven decode steps."""
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    calls = Calls(monkeypatch)
    generated(model_of(name, "lean_attention"), prompts(3, True), **arguments)
    assert calls.count == 3 * 12  # a call for each layer


class Layer(torch.nn.Module):
    num_key_value_groups = 2

    def __init__(self, causal=True):
        super().__init__()
        self.is_causal = causal


def queries_and_keys(tokens, keys, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(2, heads, n, 16).to(dtype) for heads, n in ((4, tokens), (2, keys), (2, keys)))


@pytest.mark.parametrize("said", ["by the module", "by a keyword"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [5, 9], ids=["as many keys", "a static cache holds more"])
def test_prompts_without_a_mask_see_what_they_see_in_sdpa(said, causal, keys, monkeypatch):
    q, k, v = queries_and_keys(5, keys)
    layer = Layer(causal if said == "by the module" else not causal)
    keywords = {} if said == "by the module" else dict(is_causal=causal)
    calls = Calls(monkeypatch)
    expected, _ = transformers.integrations.sdpa_attention.sdpa_attention_forward(layer, q, k, v, None, scaling=0.3, **keywords)
    out, _ = attention_forward(layer, q, k, v, None, scaling=0.3, **keywords)
    torch.testing.assert_close(out, expected)
    assert calls.count == 1


@pytest.mark.parametrize("kind", ["boolean", "a row for all queries", "additive", "of the type of q"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_under_any_mask_are_the_librarys_on_a_cpu(kind, dtype, monkeypatch):
    q, k, v = queries_and_keys(6, 40, dtype)
    seen = torch.rand(2, 1, 1 if kind == "a row for all queries" else 6, 40) < 0.6
    seen[..., 3] = True
    mask = seen
    if kind in ("additive", "of the type of q"):
        mask = torch.where(seen, torch.randn(seen.shape), torch.finfo(torch.bfloat16).min).to(dtype if kind == "of the type of q" else torch.float32)
    exact = transformers.integrations.sdpa_attention.sdpa_attention_forward(
        Layer(), *(x.float() for x in (q, k, v)), mask if mask.dtype == torch.bool else mask.float()
    )[0]
    calls = Calls(monkeypatch)
    out, _ = attention_forward(Layer(), q, k, v, mask)
    assert calls.count == 1 and out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(VERSION < (5, 0), reason="BERT has attentions of its own there")
@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_an_encoder_sees_both_sides_of_a_padded_batch(padding, monkeypatch):
    config = transformers.BertConfig(vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    hidden = {}
    ids = torch.arange(2, 24).view(2, 11)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, slice(0, 4) if padding == "left" else slice(7, 11)] = 0
    calls = Calls(monkeypatch)
    for name in ("eager", "lean_attention"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
        with torch.no_grad():
            hidden[name] = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(hidden["lean_attention"], hidden["eager"])
    assert calls.count == 3


def test_whose_prompts_are(monkeypatch):
    """The rule as it was measured: all on a CPU; on GPUs of compute capability 9.0, of 16 bits, those that PyTorch has a mask for which is
    two numbers here, and long whole ones; none in a graph."""
    from lean_attention import _prompts

    wide = [True]
    monkeypatch.setattr(_prompts, "_has_wide_tiles", lambda device: wide[0])
    ours, cpu, cuda = _prompts.are_prompts_ours, torch.device("cpu"), torch.device("cuda", 0)
    ranges, read = _prompts.Mask.RANGES, _prompts.Mask.READ
    assert all(ours(cpu, dtype, 2, 2, 40) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert not ours(cpu, torch.float64, 2, 2, 40) and not ours(None, torch.bfloat16, 512, 8192) and not ours(cpu, None, 2, 2)
    assert not ours(torch.device("meta"), torch.bfloat16, 512, 8192, 128)
    assert ours(cuda, torch.bfloat16, 2, 256, 128, ranges) and ours(cuda, torch.float16, 512, 8192, None, ranges)
    assert ours(cuda, torch.bfloat16, 512, 8192, 256, ranges) and not ours(cuda, torch.bfloat16, 512, 8192, 80, ranges)
    assert not ours(cuda, torch.float32, 512, 8192, 128, ranges) and not ours(cuda, torch.bfloat16, 16, 255, 128, ranges)
    assert ours(cuda, torch.bfloat16, 8192, 8192, 128) and not ours(cuda, torch.bfloat16, 8191, 8191, 128)
    assert not any(ours(cuda, torch.bfloat16, 8192, 8192, dim) for dim in (64, 256, None))
    assert ours(cpu, torch.float32, 2, 2, 40, read) and not ours(cuda, torch.bfloat16, 8192, 8192, 128, read)
    wide[0] = False
    assert not ours(cuda, torch.bfloat16, 512, 8192, 128, ranges)
    monkeypatch.setattr(_prompts, "is_recorded", lambda: True)
    assert not ours(cpu, torch.float32, 2, 2, 40)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_single_prompt_token(name):
    inputs = prompts(2, False, tokens=1)
    expected = generated(model_of(name, "eager"), inputs)
    assert torch.equal(generated(model_of(name, "lean_attention"), inputs), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
def test_lean_static_cache(name, padded):
    inputs = prompts(3, padded)
    expected = generated(model_of(name, "eager"), inputs)
    model = model_of(name, "lean_attention")
    cache = LeanStaticCache(model.config, max_cache_len=40)
    tokens = generated(model, inputs, disable_compile=True, **{CACHE: cache})
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
                step = model(tokens[:, begin:end], attention_mask=mask, position_ids=position, use_cache=True, **{CACHE: cache})
            cache = step[CACHE]
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
            results.append(model(ids[:, 5:], attention_mask=mask, **{CACHE: first[CACHE]}).logits)
    torch.testing.assert_close(*results)


def test_training_falls_back():
    model = model_of("llama", "lean_attention").train()
    ids = torch.randint(2, 97, (2, 7))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_decode_step_is_one_graph(name):
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
        token = model(**inputs, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        tokens = [token]
        for i in range(11):
            position = torch.full((2, 1), 11 + i)
            places = dict(position_ids=position) if VERSION >= (5, 0) else dict(position_ids=position, cache_position=position[0])
            token = step(input_ids=token, **places, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected[:, 11:])
    assert nodes and all(count == 3 for count in nodes)  # a node for each layer


def test_what_the_library_does_not_do_is_pytorchs_in_a_compiled_graph():
    torch._dynamo.reset()
    model = model_of("llama", "lean_attention", torch.float64)
    inputs = prompts(2, False)

    def step(ids, cache):
        return model(input_ids=ids, **{CACHE: cache}).logits

    with torch.no_grad():
        caches = [model(**inputs, use_cache=True)[CACHE] for _ in range(2)]
        ids = inputs["input_ids"][:, -1:]
        compiled = torch.compile(step, fullgraph=True, backend="eager")(ids, caches[0])
        torch.testing.assert_close(compiled, step(ids, caches[1]))


# --- sparse attention ------------------------------------------------------------------------------------------------


def sparse(implementation):
    """Six keys for each query of each layer."""
    config = transformers.DeepseekV32Config(
        **SMALL, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=3, index_topk=6, index_head_dim=32, index_n_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="a transformers without DeepSeek-V3.2")
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_keys_that_a_model_picks(padded, cache, monkeypatch):
    arguments = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    arguments.update(output_logits=True, return_dict_in_generate=True)
    inputs = prompts(3, padded)
    expected = generated(sparse("eager"), inputs, **arguments)
    calls = Calls(monkeypatch)
    ours = generated(sparse("lean_attention"), inputs, **arguments)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.sequences, expected.sequences) and calls.count == 3 * 12


def compressed(implementation):
    """Keys beyond the window in fours, of which each query picks some: numbers to add, which the layer puts beside its mask."""
    kinds = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    config = transformers.DeepseekV4Config(
        **SMALL, num_key_value_heads=1, head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=16, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=kinds, mlp_layer_types=["moe"] * 3,
        compress_rates=dict(zip(kinds[1:], (5, 4))), index_topk=2, index_head_dim=32, index_n_heads=2, qk_rope_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation=implementation)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="a transformers without DeepSeek-V4")
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
def test_a_model_that_puts_numbers_beside_its_mask(padded, monkeypatch):
    inputs, arguments = prompts(3, padded), dict(output_logits=True, return_dict_in_generate=True)
    expected = generated(compressed("eager"), inputs, **arguments)
    calls = Calls(monkeypatch)
    ours = generated(compressed("lean_attention"), inputs, **arguments)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.sequences, expected.sequences) and calls.count == 3 * 12


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_picked_keys_that_the_mask_hides_stay_hidden(queries, kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    seen = torch.ones(2, 1, queries, 9, dtype=torch.bool).tril(9 - queries)
    seen[1, :, :, :2] = False
    indices = torch.stack([torch.randperm(9)[:4] for _ in range(2 * queries)]).view(2, queries, 4).to(torch.int32)
    indices[..., 0] = 2  # a key that all see
    picked = (torch.arange(9) == indices[..., None]).any(2)[:, None]
    assert (picked & ~seen).any()
    mask = seen if kind == "boolean" else torch.where(seen, 0.5, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen & picked)
    out, _ = attention_forward(torch.nn.Module(), q, k, v, mask, indices=indices)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    if queries > 1:
        with pytest.raises(ValueError, match="^attention_mask: None: needed with indices"):
            attention_forward(torch.nn.Module(), q, k, v, None, indices=indices)
    else:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, picked)
        out, _ = attention_forward(torch.nn.Module(), q, k, v, None, indices=indices)
        torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.skipif(not hasattr(transformers, "MiniMaxM3VLTextConfig"), reason="a transformers without MiniMax-M3")
def test_blocks_of_keys_that_a_model_picks_are_refused():
    sizes = dict(GQA, head_dim=16, num_local_experts=2, num_experts_per_tok=2)
    for kind, refused in (("minimax_m3_sparse", True), ("full_attention", False)):
        config = transformers.MiniMaxM3VLTextConfig(**sizes, layer_types=[kind] * 3)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if refused:
            with pytest.raises(ValueError, match="attn_implementation='lean_attention': MiniMaxM3VLTextConfig .*blocks of keys"):
                model.set_attn_implementation("lean_attention")
        else:
            model.set_attn_implementation("lean_attention")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["block_indices", "head_mask", "sinks"])
def test_a_tensor_that_is_not_known_is_refused(name, packed):
    """It may change the result; those that do not are passed over."""
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    lengths = dict(cu_seq_lens_q=torch.tensor([0, 1]), cu_seq_lens_k=torch.tensor([0, 9])) if packed else {}
    with pytest.raises(NotImplementedError, match=f"^{name}: a tensor that is not read here: .*sdpa"):
        attention_forward(torch.nn.Module(), q, k, v, None, **{name: torch.ones(4)}, **lengths)
    harmless = dict.fromkeys(["position_ids", "cache_position", "token_type_ids", "seq_idx", "shift_labels"], torch.zeros(2, 1).long())
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, **{name: None}, **harmless)
    torch.testing.assert_close(out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v))


# --- models and calls that are not ours ------------------------------------------------------------------------------

NOT_THE_INTERFACE = {
    "BloomConfig": dict(hidden_size=64, n_layer=1, n_head=4),
    "MptConfig": dict(d_model=64, n_layers=1, n_heads=4),
    "XGLMConfig": dict(d_model=64, num_layers=1, attention_heads=4, ffn_dim=64),
    "GPTNeoXJapaneseConfig": dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
    "MegatronBertConfig": dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, is_decoder=True),
    "RemBertConfig": dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, is_decoder=True),
    "RoFormerConfig": dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, is_decoder=True),
    "MvpConfig": dict(d_model=64, decoder_layers=1, encoder_layers=1, decoder_attention_heads=4),
    "TrOCRConfig": dict(d_model=64, decoder_layers=1, decoder_attention_heads=4),
    "GPTNeoConfig": dict(hidden_size=64, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]),
    "FalconConfig": dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
}


@pytest.mark.parametrize("kind", NOT_THE_INTERFACE)
def test_models_without_the_interface_are_refused_when_they_are_made(kind):
    config = getattr(transformers, kind)(vocab_size=97, **NOT_THE_INTERFACE[kind])
    with pytest.raises(ValueError, match='(?s)attn_implementation=.lean_attention.: .*ForCausalLM .*use attn_implementation="eager"'):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lean_attention")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def t5gemma(implementation):
    module = dict(GQA, head_dim=16, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    config = transformers.T5GemmaConfig(encoder=module, decoder=dict(module), vocab_size=97, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
def test_an_encoder_with_a_softcap_sees_both_sides(padded):
    inputs = dict(prompts(2, padded), decoder_input_ids=torch.tensor([[1, 5, 6], [1, 7, 8]]))
    with torch.no_grad():
        expected, ours = (t5gemma(name)(**inputs).logits for name in ("eager", "lean_attention"))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("said", ["by the module", "by a keyword"])
def test_a_softcap_without_a_mask_is_causal_only_where_that_is_said(said):
    """Of a model whose own function would be asked; q [2, 4, 5, 16], k and v [2, 4, 9, 16]."""
    from transformers.models.gemma2 import modeling_gemma2

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    scores = 5.0 * torch.tanh(q @ k.transpose(2, 3) / 4 / 5.0)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    module = type("Module", (torch.nn.Module,), dict(__module__=modeling_gemma2.__name__, num_key_value_groups=1))()
    module.is_causal = said != "by the module"
    keywords = dict(is_causal=False) if said == "by a keyword" else {}
    out, _ = attention_forward(module.eval(), q, k, v, None, scaling=0.25, softcap=5.0, **keywords)
    torch.testing.assert_close(out, expected)


def test_sinks_that_alone_are_learned_get_their_gradient():
    """Everything else frozen: the layer's inputs need none, and the library would return what has none."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    module = type("Module", (torch.nn.Module,), dict(__module__=modeling_gpt_oss.__name__, num_key_value_groups=1))().eval()
    sinks = torch.randn(4, requires_grad=True)
    module.sinks = torch.nn.Parameter(sinks.detach())  # where eager attention looks
    out, _ = attention_forward(module, q, k, v, None, scaling=0.25, s_aux=module.sinks)
    out.sum().backward()
    scores = torch.cat((q @ k.transpose(2, 3) * 0.25, sinks.view(1, 4, 1, 1).expand(2, -1, 1, -1)), -1)
    expected = (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    expected.sum().backward()
    torch.testing.assert_close(module.sinks.grad, sinks.grad)


@pytest.mark.parametrize("door", ["hf", "sdpa"])
def test_autocast_casts_as_it_does_for_sdpa(door, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16, dtype=torch.bfloat16)
    mask = torch.randn(2, 1, 1, 9)
    calls = Calls(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        if door == "hf":
            out = attention_forward(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)
        else:
            import lean_attention.sdpa

            monkeypatch.setattr(lean_attention.sdpa, "decode", lean_attention._accepts.decode)
            out = lean_attention.sdpa.scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == expected.dtype == torch.bfloat16 and calls.count == 1
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_a_step_under_autocast_is_the_librarys(monkeypatch):
    model = model_of("llama", "lean_attention")
    calls = Calls(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        generated(model, prompts(2, True))
    assert calls.count == 3 * 12


def test_tangents_go_to_pytorchs_attention():
    from torch.autograd import forward_ad

    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    with forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        out, _ = attention_forward(torch.nn.Module(), q, k, dual, None)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, torch.ones(2, 1, 4, 16))


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_lengths_are_not_handed_to_another_kernel(grad):
    """What the library does not do at all is; a value that is wrong is nobody's to compute."""
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    mask = _hf_masks.KeyRanges(*torch.tensor([[0, 0], [9, 500]], dtype=torch.int32), 0, 1, 9)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^seqlens\[1\] = 500: allowed 0 to 9"):
                attention_forward(torch.nn.Module(), q, k, v, mask)
        for wide in (torch.float64, torch.float32):
            one = k[:1].to(wide), v[:1].to(wide)  # PyTorch's attention broadcasts a batch of one
            out, _ = attention_forward(torch.nn.Module(), q.to(wide), *one, None)
            expected = torch.nn.functional.scaled_dot_product_attention(q.to(wide), *one)
            torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_mask_of_integers_with_four_axes_is_refused(name, dtype, tokens):
    """Eager attention adds its ones to the scores."""
    model = model_of(name, "lean_attention")
    ids = torch.arange(3, 3 + tokens)[None]
    mask = torch.ones(1, 1, tokens, tokens, dtype=dtype).tril()
    with torch.no_grad():
        with pytest.raises(TypeError, match=f"^attention_mask: {dtype}: .* boolean .* additive"):
            model(ids, attention_mask=mask)
        expected = model_of(name, "eager")(ids, attention_mask=torch.where(mask > 0, 0.0, -torch.inf)).logits
        torch.testing.assert_close(model(ids, attention_mask=mask.bool()).logits, expected)


def test_a_full_static_cache_says_so():
    model = model_of("llama", "lean_attention")
    ids = torch.arange(3, 13)[None]
    cache = LeanStaticCache(model.config, max_cache_len=8)
    with torch.no_grad():
        with pytest.raises(ValueError, match="LeanStaticCache: .*10 more .*max_cache_len = 8"):
            model(ids, **{CACHE: cache})
        cache = LeanStaticCache(model.config, max_cache_len=8)
        model(ids[:, :7], **{CACHE: cache})
        if VERSION < (5, 0):
            return
        model(ids[:, 7:8], **{CACHE: cache})
        for _ in range(2):
            with pytest.raises(ValueError, match="LeanStaticCache: 8 tokens are there, 1 more do not fit in max_cache_len = 8"):
                model(ids[:, 8:9], **{CACHE: cache})
        cache.reset()
        model(ids[:, :8], **{CACHE: cache})


def test_the_hosts_count_of_a_full_cache_is_checked_before_it_is_believed(monkeypatch):
    """On a device nothing is asked before the host's count says full, and it does not see crop()."""
    from lean_attention._hf_cache import LeanStaticLayer

    asked = []

    class Counted:
        device = torch.device("cuda")

        def __int__(self):
            asked.append(1)
            return 3

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer = LeanStaticLayer(max_cache_len=4)
    layer.cumulative_length = Counted()
    layer._need_room(4)
    assert not asked
    layer._need_room(1)
    assert asked and layer.counted == 4
    with pytest.raises(ValueError, match="3 tokens are there, 2 more"):
        layer._need_room(2)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_documented_call_warns_of_nothing():
    model = model_of("llama", "lean_attention")
    cache = LeanStaticCache(model.config, max_cache_len=40)
    generated(model, prompts(2, False), disable_compile=True, **{CACHE: cache})

"""Transformers on a GPU, in 16 bits: logits of the same tokens stay near those of the fp32 model, for models of each kind."""

import pytest
from gpu import torch

transformers = pytest.importorskip("transformers", minversion="4.57")

import test_hf  # noqa: E402
from test_hf import CACHE, MODELS, VERSION, Calls, model_of, prompts  # noqa: E402

from lean_attention.hf import LeanStaticCache  # noqa: E402

STEPS = 12


def on_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def generated(model, inputs, **arguments):
    """(tokens, logits [B, steps, vocabulary] in float32)."""
    result = model.generate(
        **inputs, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True, **arguments
    )
    return result.sequences, torch.stack(result.logits, 1).float()


def logits_of(name, implementation, dtype, tokens, mask):
    """What one pass over all tokens says of the next ones."""
    mask = torch.cat([mask, mask.new_ones(mask.shape[0], STEPS)], 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model_of(name, implementation, dtype).cuda()(tokens, attention_mask=mask, position_ids=position)
    return whole.logits[:, -STEPS - 1 : -1].float()


def check(name, dtype, inputs, tokens, ours):
    """Not farther from the fp32 model than 2 times what eager attention in the same type is."""
    exact, eager = (logits_of(name, "eager", kind, tokens, inputs["attention_mask"]) for kind in (torch.float32, dtype))
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "lean"])
def test_logits(name, padded, cache, monkeypatch):
    calls = Calls(monkeypatch)
    inputs = on_gpu(prompts(3, padded))
    model = model_of(name, "lean_attention", torch.bfloat16).cuda()
    arguments = dict(dynamic={}, static=dict(cache_implementation="static", disable_compile=True), lean=dict(disable_compile=True))[cache]
    if cache == "lean":
        arguments[CACHE] = LeanStaticCache(model.config, max_cache_len=40)
    tokens, ours = generated(model, inputs, **arguments)
    assert calls.count >= model.config.num_hidden_layers * (STEPS - 1)  # every decode step was the library's
    check(name, torch.bfloat16, inputs, tokens, ours)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="chunks have a kernel of their own on 9.0 alone")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens, keys, padded", [(8192, 8192, False), (512, 8192, False), (16, 256, False), (512, 8192, True), (40, 300, True)])
def test_prompts_are_whose_they_are_faster(tokens, keys, padded, dim, monkeypatch):
    """What PyTorch's attention in fp32 gives, as near as its own in bf16. Whole prompts of 64 dims are PyTorch's."""
    from lean_attention import _hf_masks
    from lean_attention.hf import attention_forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, dim, device="cuda", dtype=torch.bfloat16) for heads, n in ((8, tokens), (2, keys), (2, keys)))
    padding = torch.ones(2, keys, dtype=torch.bool, device="cuda")
    if padded:
        padding[1, : keys // 3] = False
    places = dict(q_offset=keys - tokens) if VERSION >= (5, 0) else dict(cache_position=torch.arange(keys - tokens, keys, device="cuda"))
    config = model_of("llama", "eager").config
    config.head_dim = dim
    mask = _hf_masks.attention_mask(
        batch_size=2, q_length=tokens, kv_length=keys, attention_mask=padding if padded else None,
        dtype=torch.bfloat16, device=torch.device("cuda"), config=config, **places,
    )  # fmt: skip
    calls = Calls(monkeypatch)
    with torch.no_grad():
        ours = attention_forward(test_hf.Layer(), q, k, v, mask)[0].transpose(1, 2).float()
        of_sdpa = torch.nn.functional.scaled_dot_product_attention
        theirs = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        exact = of_sdpa(*(x.float() for x in (q, k, v)), **theirs)
        near = of_sdpa(q, k, v, **theirs).float()
    assert calls.count == (0 if tokens == keys and dim == 64 else 1)
    assert (ours - exact).norm() <= 2 * (near - exact).norm()


def test_fp16():
    inputs = on_gpu(prompts(2, True))
    model = model_of("llama_64", "lean_attention", torch.float16).cuda()
    check("llama_64", torch.float16, inputs, *generated(model, inputs))


def test_beam_search_runs():
    inputs = on_gpu(prompts(2, True))
    beams = dict(max_new_tokens=STEPS, do_sample=False, num_beams=3)
    tokens = model_of("llama_64", "lean_attention", torch.bfloat16).cuda().generate(**inputs, **beams)
    assert tokens.shape == (2, 11 + STEPS)


@pytest.mark.parametrize("cache", ["static", "lean"])
def test_generate_compiles_steps_into_cuda_graphs(cache):
    """generate() does so by itself for a cache whose addresses stay."""
    torch._dynamo.reset()
    inputs = on_gpu(prompts(2, True))
    model = model_of("llama_64", "lean_attention", torch.bfloat16).cuda()
    arguments = dict(cache_implementation="static")
    if cache == "lean":
        arguments = {CACHE: LeanStaticCache(model.config, max_cache_len=64)}
    tokens, ours = generated(model, inputs, **arguments)
    check("llama_64", torch.bfloat16, inputs, tokens, ours)


def decoded(model, inputs, in_a_graph):
    """Tokens of greedy steps on a LeanStaticCache, the steps run one by one or replayed from one that was captured."""
    cache = LeanStaticCache(model.config, max_cache_len=64)
    token = model(**inputs, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    position = torch.full((2, 1), 11, device="cuda")

    def step():
        logits = model(input_ids=token, position_ids=position, **{CACHE: cache}).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    step()
    tokens, run = [token.clone()], step
    if in_a_graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for _ in range(STEPS):
        run()
        tokens.append(token.clone())
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_continuous_batching(name):
    """generate_batch(): every token is one that the fp32 model would choose too, but for what 16 bits may cost."""
    if VERSION < (5, 23):
        pytest.skip("transformers below 5.23")
    model = model_of(name, "eager", torch.float16).cuda()
    model.set_attn_implementation("paged|lean_flash")
    prompt_ids = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 5], list(range(20, 50))]
    result = model.generate_batch(
        inputs=prompt_ids, progress_bar=False,
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16),
    )  # fmt: skip
    models = [model_of(name, "eager", dtype).cuda() for dtype in (torch.float32, torch.float16)]
    for prompt, key in zip(prompt_ids, sorted(result)):
        new = result[key].generated_tokens
        assert len(new) == 8
        tokens = torch.tensor([prompt + new], device="cuda")
        with torch.no_grad():
            exact, half = (m(tokens).logits[0, len(prompt) - 1 : -1].float() for m in models)
        chosen = exact.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        assert (exact.amax(1) - chosen).max() <= 2 * (half - exact).abs().max()


def test_holes_in_a_mask_leave_the_device_alive():
    """A batch's second turn: its first one was padded on the right."""
    from test_hf_masks import chat

    expected, ours = (chat(name, "cuda", torch.bfloat16) for name in ("eager", "lean_attention"))
    exact = chat("eager", "cuda", torch.float32)
    assert (ours - exact).norm() <= 2 * (expected - exact).norm()


def test_a_captured_step_follows_the_tokens():
    """Lengths grow on the device, and nothing waits for it."""
    inputs = on_gpu(prompts(2, False))
    model = model_of("llama_64", "lean_attention", torch.bfloat16).cuda()
    with torch.no_grad():
        assert torch.equal(decoded(model, inputs, True), decoded(model, inputs, False))


def test_a_type_the_backend_lacks_is_pytorchs(monkeypatch):
    """fp32 on a GPU: the call goes to PyTorch, the tokens are eager's."""
    calls = Calls(monkeypatch)
    inputs = on_gpu(prompts(2, True))
    expected = test_hf.generated(model_of("llama_64", "eager").cuda(), inputs)
    assert torch.equal(test_hf.generated(model_of("llama_64", "lean_attention").cuda(), inputs), expected)
    assert calls.count == 0

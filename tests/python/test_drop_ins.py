"""scaled_dot_product_attention: the function and PyTorch's hook."""

import pytest

torch = pytest.importorskip("torch")

from conftest import needs  # noqa: E402
from oracle import attention  # noqa: E402
from pages import tensors  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import sdpa  # noqa: E402


@pytest.fixture
def counted(monkeypatch):
    calls = []
    original = sdpa.decode
    monkeypatch.setattr(sdpa, "decode", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    return calls


needs_hook = pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="torch below 2.11")


@pytest.fixture
def enabled():
    lean_attention.enable_sdpa()
    yield torch.nn.functional.scaled_dot_product_attention
    sdpa.disable_sdpa()


@needs_hook
def test_sdpa_decode_is_ours(enabled, counted):
    q, k, v = tensors()
    with torch.no_grad():
        out = enabled(q, k, v, enable_gqa=True, scale=0.2)
    assert len(counted) == 1
    attention(q, k, v, scale=0.2).check(out)


@needs_hook
@pytest.mark.parametrize("door", ["hook", "compiled", "function"])
def test_sdpa_a_scale_of_zero_is_the_mean_of_the_values(enabled, counted, door):
    q, k, v = tensors()
    call = sdpa.scaled_dot_product_attention if door == "function" else enabled
    if door == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = call(q, k, v, enable_gqa=True, scale=0.0)
    assert len(counted) == 1
    torch.testing.assert_close(out, v.mean(2, keepdim=True).repeat_interleave(3, 1))


@needs_hook
def test_sdpa_compiles(enabled):
    q, k, v = tensors()
    with torch.no_grad():
        out = torch.compile(lambda q, k, v: enabled(q, k, v, enable_gqa=True), fullgraph=True, backend="aot_eager")(q, k, v)
    attention(q, k, v).check(out)


@needs("mask")
@needs_hook
@pytest.mark.parametrize("boolean", [False, True])
def test_sdpa_masks_are_ours(enabled, counted, boolean):
    q, k, v = tensors()
    mask = torch.rand(2, 1, 1, 37) > 0.4 if boolean else torch.randn(1, 37)
    with torch.no_grad():
        out = enabled(q, k, v, attn_mask=mask, enable_gqa=True)
    assert len(counted) == 1
    attention(q, k, v, mask=mask.numpy()).check(out)


@needs_hook
@pytest.mark.parametrize("door", ["hook", "compiled", "function"])
@pytest.mark.parametrize("kind", ["both sides", "causal", "boolean mask", "additive mask"])
def test_sdpa_prompts_are_ours_on_a_cpu(enabled, counted, door, kind):
    """37 queries over as many keys; a compiled graph calls the same kernel."""
    q, k, v = tensors(q_tokens=37)
    mask = {"boolean mask": torch.rand(2, 1, 37, 37) > 0.4, "additive mask": torch.randn(37, 37)}.get(kind)
    arguments = dict(enable_gqa=True, is_causal=kind == "causal", attn_mask=mask)
    call = sdpa.scaled_dot_product_attention if door == "function" else enabled
    if door == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = call(q, k, v, **arguments)
        assert len(counted) == 1
        sdpa.disable_sdpa()
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments))


@needs_hook
def test_sdpa_prompts_have_the_log_sum_exp_of_pytorchs_kernel(enabled, counted):
    """What attention that is merged afterwards reads (ring attention)."""
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    with torch.no_grad():
        ours = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        sdpa.disable_sdpa()
        theirs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    assert len(counted) == 1
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


@needs_hook
@pytest.mark.parametrize("arguments, q_tokens", [(dict(is_causal=True), 1), (dict(is_causal=True), 5)], ids=["one", "fewer than keys"])
def test_sdpa_hands_back_the_rest(enabled, counted, arguments, q_tokens):
    q, k, v = tensors(q_tokens=q_tokens)
    sdpa.disable_sdpa()
    with torch.no_grad():
        expected = enabled(q, k, v, enable_gqa=True, **arguments)
        lean_attention.enable_sdpa()
        assert torch.equal(enabled(q, k, v, enable_gqa=True, **arguments), expected)
    assert not counted


@needs_hook
def test_sdpa_gradients_are_pytorchs(enabled, counted):
    q, k, v = (x.requires_grad_() for x in tensors())
    enabled(q, k, v, enable_gqa=True).sum().backward()
    assert not counted and v.grad is not None


@pytest.mark.parametrize("door", ["function", pytest.param("hook", marks=needs_hook)])
def test_sdpa_a_mask_that_is_learned_is_pytorchs(request, counted, door):
    """A bias of positions, over keys that are not learned."""
    q, k, v = tensors()
    call = sdpa.scaled_dot_product_attention if door == "function" else request.getfixturevalue("enabled")
    bias = torch.randn(1, q.shape[1], 1, 37, requires_grad=True)
    call(q, k, v, attn_mask=bias, enable_gqa=True).sum().backward()
    assert not counted and bias.grad is not None and bias.grad.abs().sum() > 0


def test_sdpa_function_leaves_axes_that_pytorch_broadcasts_to_it(counted):
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(4, 9, 16), torch.randn(4, 9, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(sdpa.scaled_dot_product_attention(q, k, v), expected) and not counted


@needs_hook
def test_sdpa_is_given_back(counted):
    q, k, v = tensors()
    with torch.no_grad():
        before = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        lean_attention.enable_sdpa()
        lean_attention.enable_sdpa()
        sdpa.disable_sdpa()
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), before)
    assert not counted and torch.nn.attention.current_flash_attention_impl() is None


def test_sdpa_function_without_the_hook(counted):
    q, k, v = tensors()
    attention(q, k, v).check(sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert len(counted) == 1
    q, k, v = tensors(q_tokens=3)
    attention(q, k, v).check(sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert len(counted) == 2
    with pytest.raises(RuntimeError):
        sdpa.scaled_dot_product_attention(q, k, v)  # as PyTorch does: heads differ without enable_gqa
    assert len(counted) == 2

"""The package on a GPU: streams, graphs, workspaces, devices. Skipped without one, and in a build without the CUDA backend."""

import pytest

torch = pytest.importorskip("torch")

from conftest import arrays  # noqa: E402
from oracle import attention  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import _core, decode  # noqa: E402

if not (torch.cuda.is_available() and _core.machine()["cuda_built"]):
    pytest.skip("no GPU, or a build without the CUDA backend", allow_module_level=True)


def tensors(dtype=torch.bfloat16, dim=64, **sizes):
    return [torch.from_numpy(x).to("cuda", dtype) for x in arrays(dim=dim, **sizes)]


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_against_the_oracle(dtype, layout):
    q, k, v = tensors(dtype, batch=3, q_tokens=2, kv_tokens=700)
    seqlens = lengths(700, 0, 33)
    given = (q, k, v) if layout == "bhsd" else [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = decode(*given, seqlens=seqlens, causal=True, layout=layout, return_lse=True)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    attention(q, k, v, seqlens=seqlens, causal=True, dtype=str(dtype).removeprefix("torch.")).check(out, lse)


def test_lists_become_device_lengths():
    q, k, v = tensors()
    assert torch.equal(decode(q, k, v, seqlens=[37, 5]), decode(q, k, v, seqlens=lengths(37, 5)))


def test_the_current_stream_is_used():
    """What an earlier kernel of the stream is still writing is waited for."""
    q, k, v = tensors(kv_tokens=4096)
    expected = decode(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = decode(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_replays_with_new_lengths_and_after_the_workspace_grew():
    q, k, v = tensors(kv_tokens=3000)
    seqlens, out = lengths(3000, 3000), torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, k, v, seqlens=seqlens, out=out)
    large = tensors(batch=64, q_heads=32, kv_heads=8, dim=128, q_tokens=4, kv_tokens=512)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        decode(*large)
    for values in ((3000, 3000), (1, 2999), (0, 64)):
        seqlens.copy_(lengths(*values))
        graph.replay()
        assert torch.equal(out, decode(q, k, v, seqlens=lengths(*values)))


def test_opcheck():
    q, k, v = tensors()
    torch.library.opcheck(torch.ops.lean_attention.decode.default, (q, k, v), dict(seqlens=lengths(37, 5)))
    torch.library.opcheck(torch.ops.lean_attention.decode_lse.default, (q, k, v), dict(causal=True))


def test_reduce_overhead():
    step = torch.compile(lambda q, k, v, n: decode(q * 2, k, v, seqlens=n) + 1, fullgraph=True, mode="reduce-overhead")
    q, k, v = tensors(kv_tokens=900)
    for values in ((900, 900), (5, 800), (900, 0), (77, 78)):
        n = lengths(*values)
        torch.testing.assert_close(step(q, k, v, n).clone(), decode(q * 2, k, v, seqlens=n) + 1)


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("seqlens", ValueError, dict(seqlens=torch.tensor([37, 5], dtype=torch.int32))),
        ("seqlens", TypeError, dict(seqlens=torch.tensor([37, 5], device="cuda"))),
        ("out", ValueError, dict(out=torch.empty(2, 6, 1, 64, dtype=torch.bfloat16))),
    ],
)
def test_r50_misuse_names_the_argument(name, error, arguments):
    with pytest.raises(error, match=f"^{name}:"):
        decode(*tensors(), **arguments)


def test_r50_keys_on_the_host():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^k: must be on the device of q"):
        decode(q, k.cpu(), v)


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = (x.to("cuda:1") for x in tensors())
    out = decode(q, k, v)
    assert torch.cuda.current_device() == 0
    attention(q, k, v, dtype="bfloat16").check(out)


def test_workspaces_are_given_back():
    q, k, v = tensors(batch=64, kv_tokens=512)
    first = decode(q, k, v)
    torch.cuda.synchronize()
    lean_attention.clear_workspaces()
    assert torch.equal(decode(q, k, v), first)


def test_sdpa():
    from lean_attention import sdpa

    q, k, v = tensors()
    lean_attention.enable_sdpa()
    try:
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    finally:
        sdpa.disable_sdpa()
    assert torch.equal(out, decode(q, k, v))


@pytest.mark.parametrize("cache", ["dynamic", "static", "lean"])
def test_transformers(cache):
    """generate() compiles a static cache's steps by itself; the logits of its tokens stay near those of the fp32 model."""
    pytest.importorskip("transformers", minversion="4.56")
    from test_hf import model_of, prompts

    from lean_attention.hf import LeanStaticCache

    inputs = {name: x.cuda() for name, x in prompts(2, True).items()}
    model = model_of("llama_64", "lean_attention", torch.bfloat16).cuda()
    arguments = dict(dynamic={}, static=dict(cache_implementation="static"), lean={})[cache]
    if cache == "lean":
        arguments = dict(past_key_values=LeanStaticCache(model.config, max_cache_len=64))
    result = model.generate(**inputs, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True, **arguments)

    def logits(implementation, dtype):
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 12)], 1)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            whole = model_of("llama_64", implementation, dtype).cuda()(result.sequences, attention_mask=mask, position_ids=position)
        return whole.logits[:, 10:-1].float().transpose(0, 1)

    exact, eager = logits("eager", torch.float32), logits("eager", torch.bfloat16)
    ours = torch.stack(result.logits).float()
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()

"""decode() and torch.ops.lean_attention on a GPU: results, streams, graphs, workspaces, devices."""

import threading

import pytest
from gpu import lengths, name_of, tensors, torch
from oracle import attention

import lean_attention
from lean_attention import Options, decode
from lean_attention._vllm_call import Batch, PagedLayer

OPS = torch.ops.lean_attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_against_the_oracle(dtype, layout, dim):
    q, k, v = tensors(dtype, dim, batch=3, q_tokens=2, kv_tokens=700)
    seqlens, leftpad = lengths(700, 0, 33), lengths(5, 0, 20)
    given = (q, k, v) if layout == "bhsd" else [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = decode(*given, seqlens=seqlens, leftpad=leftpad, causal=True, scale=0.2, layout=layout, return_lse=True)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    attention(q, k, v, seqlens=seqlens, leftpad=leftpad, causal=True, scale=0.2, dtype=name_of(dtype)).check(out, lse)


@pytest.mark.parametrize(
    "rules",
    [
        dict(window=(40, 0)),
        dict(softcap=2.0),
        dict(alibi_slopes=torch.linspace(0.1, 0.6, 6)),
        dict(sinks=torch.linspace(-1, 3, 6)),
        dict(causal=True, window=(9, -1), softcap=5.0, sinks=torch.linspace(-1, 3, 6)),
    ],
    ids=lambda rules: "+".join(rules),
)
def test_score_rules(rules):
    q, k, v = tensors(q_tokens=2, kv_tokens=300)
    on_device = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in rules.items()}
    out, lse = decode(q, k, v, seqlens=lengths(300, 71), return_lse=True, **on_device)
    attention(q, k, v, seqlens=[300, 71], dtype="bfloat16", **rules).check(out, lse)


def test_one_token_without_an_axis():
    q, k, v = tensors(kv_tokens=300)
    out, lse = decode(q[:, :, 0], k, v, return_lse=True)
    attention(q, k, v, dtype="bfloat16").check(out[:, :, None], lse[:, :, None])


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages(page):
    q, k, v = tensors(kv_tokens=192)
    pages = 192 // page
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).cuda()
    pools = [torch.empty(2 * pages, page, 2, 64, dtype=q.dtype, device="cuda") for _ in range(2)]
    for pool, x in zip(pools, (k, v)):
        pool[order] = x.transpose(1, 2).reshape(2 * pages, page, 2, 64)
    seqlens, table = lengths(192, 70), order.to(torch.int32).view(2, pages)
    query = q.transpose(1, 2)
    out = decode(query, *pools, seqlens=seqlens, block_table=table, layout="bshd").transpose(1, 2)
    attention(q, k, v, seqlens=seqlens, dtype="bfloat16").check(out)
    indptr = lengths(0, pages, 2 * pages)
    by_list = decode(query, *pools, seqlens=seqlens, page_indptr=indptr, page_indices=table.flatten(), layout="bshd")
    assert torch.equal(by_list.transpose(1, 2), out)


def test_packed_tokens():
    q, k, v = tensors(kv_tokens=64)
    packed = [torch.cat([x[0, :, :40], x[1, :, :64]], 1) for x in (k, v)]
    out = decode(q[:, :, 0].transpose(0, 1), *packed, cu_seqlens_q=lengths(0, 1, 2), cu_seqlens_k=lengths(0, 40, 104), max_seqlen_q=1)
    attention(q, k, v, seqlens=[40, 64], dtype="bfloat16").check(out.transpose(0, 1)[:, :, None])


def test_lists_become_device_lengths():
    q, k, v = tensors()
    assert torch.equal(decode(q, k, v, seqlens=[37, 5]), decode(q, k, v, seqlens=lengths(37, 5)))


@pytest.mark.parametrize("policy", ["data_parallel", "fixed_split"])
def test_other_schedules(policy):
    q, k, v = tensors(kv_tokens=900)
    attention(q, k, v, dtype="bfloat16").check(decode(q, k, v, options=Options(policy=policy)))


@pytest.mark.parametrize("dim", [59, 64, 128])  # the plain kernel's, and others'
def test_sticky_status_names_the_first_entry(dim):
    q, k, v = tensors(dim=dim, kv_tokens=128)
    lean_attention.sticky_status(q)  # forgets what others left
    decode(q, k, v, seqlens=lengths(128, 500))
    decode(q, k, v, seqlens=lengths(-1, 5))
    found = lean_attention.sticky_status(q)
    assert (found.code, found.reason.split(" (")[0]) == ("bad_lengths", "seqlens[1] = 500: allowed 0 to 128")
    pool = torch.zeros(4, 16, 2, dim, dtype=q.dtype, device="cuda")
    table = torch.tensor([[0, 1], [2, 99]], dtype=torch.int32, device="cuda")
    decode(q.transpose(1, 2), pool, pool, seqlens=lengths(20, 20), block_table=table, layout="bshd")
    found = lean_attention.sticky_status(q)
    assert (found.code, found.reason.split(";")[0]) == ("bad_page_index", "block_table[1, 1] = 99: allowed 0 to 3")
    assert lean_attention.sticky_status(q)


# --- streams and graphs ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name, value", [("seqlens", [37, 5]), ("seqlens", 5), ("leftpad", [1, 2]), ("k_scale", 0.5)])
def test_lists_and_numbers_are_refused_beside_another_stream(name, value):
    """Their arrays would be made, and given back, on the current stream."""
    q, k, v = tensors()
    if name == "k_scale":
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    expected, side = decode(q, k, v, **{name: value}), torch.cuda.Stream()
    with pytest.raises(ValueError, match=f"^{name}: a list or a number, and stream is not the framework's current one"):
        decode(q, k, v, stream=side.cuda_stream, **{name: value})
    assert torch.equal(decode(q, k, v, stream=torch.cuda.current_stream().cuda_stream, **{name: value}), expected)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(decode(q, k, v, stream=side.cuda_stream, **{name: value}), expected)


def test_nothing_waits_for_the_device():
    """A call returns while the stream is still busy with what came before it."""
    q, k, v = tensors()
    seqlens = lengths(37, 5)
    decode(q, k, v, seqlens=seqlens)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    decode(q, k, v, seqlens=seqlens)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_calls_on_two_streams_at_once():
    q, k, v = tensors(batch=8, kv_tokens=4096)
    expected = decode(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(decode(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_threads_on_their_default_streams_at_once():
    """cudaStreamPerThread, 2, is one handle and another stream in each thread."""
    q, k, v = tensors(batch=8, kv_tokens=4096)
    expected = decode(q, k, v)
    outs = [[torch.zeros_like(q) for _ in range(50)] for _ in range(4)]
    torch.cuda.synchronize()

    def work(own):
        for out in own:
            decode(q, k, v, out=out, stream=2)

    threads = [threading.Thread(target=work, args=(own,)) for own in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for own in outs for out in own)


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


@pytest.mark.parametrize("head_major", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["bf16", "e4m3", "e5m2"])
def test_a_graph_of_a_servers_step_is_right_whatever_requests_a_replay_has(fp8, head_major):
    """One graph of 40 query tokens for chunks, decode rows and both: query starts, lengths and tables are read on the device, and rows
    behind the last request are left alone."""
    tokens, most, page, dim, scales = 40, 13 * 16, 16, 64, (0.5, 2.0)
    generator = torch.Generator().manual_seed(5)
    shape = (60, 2, page, dim) if head_major else (60, page, 2, dim)
    values = [torch.randn(shape, generator=generator).cuda().to(torch.bfloat16) for _ in scales]
    pools = values
    if fp8:
        pools = [(x / scale).to(fp8) for x, scale in zip(values, scales)]
        values, pools = [x.float() * scale for x, scale in zip(pools, scales)], [x.view(torch.uint8) for x in pools]
    if not head_major:
        values, pools = ([x.transpose(1, 2) for x in each] for each in (values, pools))
    query = torch.randn(tokens, 8, dim, generator=generator).cuda().to(torch.bfloat16)
    table = torch.randperm(60, generator=generator)[: 4 * 13].view(4, 13).int().cuda()
    starts, seqlens, out = lengths(0, 10, 20, 30, 40), lengths(10, 10, 10, 10), torch.empty_like(query)
    layer = PagedLayer(scale=0.125, fp8=fp8)
    batch = Batch(tokens, tokens, starts, most, seqlens, table, None)
    device_scales = tuple(torch.tensor(scale, device="cuda") for scale in scales)
    layer.attend(query, None, None, tuple(pools), batch, out, device_scales)  # makes the workspace that the graph keeps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.attend(query, None, None, tuple(pools), batch, out, device_scales)
    steps = [([40, 0, 0, 0], [200, 0, 0, 0]), ([1, 37, 1, 1], [70, 49, 200, 16]), ([1, 1, 1, 1], [1, 208, 33, 90]), ([10] * 4, [10, 70, 11, 208])]
    for new, kept in steps:
        starts.copy_(torch.tensor([0, *new]).cumsum(0))
        seqlens.copy_(torch.tensor(kept))
        table.copy_(table.roll(1, 0))
        out.fill_(float("nan"))
        graph.replay()
        first = 0
        for pages, count, length in zip(table.long(), new, kept):
            k, v = (x[pages].transpose(0, 1).reshape(2, most, dim)[:, :length].double().repeat_interleave(4, 0) for x in values)
            q = query[first : first + count].double().transpose(0, 1)
            hidden = torch.ones(count, length, dtype=torch.bool, device="cuda").triu(length - count + 1)
            expected = (0.125 * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
            torch.testing.assert_close(out[first : first + count].double(), expected.transpose(0, 1), atol=0.02, rtol=0.02)
            first += count
        assert out[first:].isnan().all()
    assert lean_attention.sticky_status(query)


def test_a_graph_of_a_servers_step_has_the_sinks_of_its_replay():
    """An engine that loads weights anew does so in their memory, and captures nothing again."""
    query, out, again = torch.randn(2, 8, 64, device="cuda").bfloat16(), *torch.empty(2, 2, 8, 64, device="cuda").bfloat16()
    pools = tuple(torch.randn(2, 6, 2, 16, 64, device="cuda").bfloat16())
    batch = Batch(2, 1, lengths(0, 1, 2), 48, lengths(48, 33), lengths(0, 1, 2, 3, 4, 5).view(2, 3), None)
    sinks = torch.zeros(8, device="cuda", dtype=torch.bfloat16)
    layer = PagedLayer(scale=0.125, sinks=sinks)
    layer.attend(query, None, None, pools, batch, again)  # makes the workspace that the graph keeps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.attend(query, None, None, pools, batch, out)
    sinks.copy_(torch.linspace(-1, 3, 8))
    graph.replay()
    assert not torch.equal(out, again)
    PagedLayer(scale=0.125, sinks=sinks.float()).attend(query, None, None, pools, batch, again)
    assert torch.equal(out, again)


def test_a_graph_of_the_operator():
    q, k, v = tensors(kv_tokens=900)
    seqlens = lengths(900, 900)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out, lse = OPS.decode_lse(q, k, v, seqlens=seqlens)
    for values in ((900, 3), (17, 800)):
        seqlens.copy_(lengths(*values))
        graph.replay()
        attention(q, k, v, seqlens=values, dtype="bfloat16").check(out, lse)


def test_workspaces_are_given_back():
    q, k, v = tensors(batch=64, kv_tokens=512)
    first = decode(q, k, v)
    torch.cuda.synchronize()
    lean_attention.clear_workspaces()
    assert torch.equal(decode(q, k, v), first)


# --- torch.compile ---------------------------------------------------------------------------------------------------


def test_opcheck():
    q, k, v = tensors(q_tokens=2)
    torch.library.opcheck(OPS.decode.default, (q, k, v), dict(seqlens=lengths(37, 5)))
    torch.library.opcheck(OPS.decode_lse.default, (q, k, v), dict(causal=True, window_left=4, sinks=torch.ones(6, device="cuda")))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_is_one_graph(dynamic):
    step = torch.compile(lambda q, k, v, n: decode(q * 2, k, v, seqlens=n) + 1, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (37, 38, 64):
        q, k, v = tensors(kv_tokens=tokens)
        n = lengths(tokens, 9)
        assert torch.equal(step(q, k, v, n), decode(q * 2, k, v, seqlens=n) + 1)


def test_reduce_overhead():
    """Inductor puts the step into a CUDA graph; the lengths it reads change on the device."""
    step = torch.compile(lambda q, k, v, n: decode(q * 2, k, v, seqlens=n) + 1, fullgraph=True, mode="reduce-overhead")
    q, k, v = tensors(kv_tokens=900)
    for values in ((900, 900), (5, 800), (900, 0), (77, 78)):
        n = lengths(*values)
        torch.testing.assert_close(step(q, k, v, n).clone(), decode(q * 2, k, v, seqlens=n) + 1)


# --- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("seqlens", ValueError, dict(seqlens=torch.tensor([37, 5], dtype=torch.int32))),
        ("seqlens", TypeError, dict(seqlens=torch.tensor([37, 5], device="cuda"))),
        ("seqlens", ValueError, dict(seqlens=lengths(37, 0, 5, 0)[::2])),
        ("out", ValueError, dict(out=torch.empty(2, 6, 1, 64, dtype=torch.bfloat16))),
        ("sinks", ValueError, dict(sinks=torch.ones(6))),
    ],
    ids=["host", "int64", "strided", "out_on_host", "sinks_on_host"],
)
def test_r50_misuse_names_the_argument(name, error, arguments):
    with pytest.raises(error, match=f"^{name}:"):
        decode(*tensors(), **arguments)


def test_r50_keys_on_the_host():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^k: is on the CPU: must be on the device of q"):
        decode(q, k.cpu(), v)


def test_r50_types_it_does_not_have():
    """fp32 is the CPU's; supports() says so before a call does."""
    q, k, v = tensors(torch.float32)
    assert lean_attention.supports(q, k, v).code == "unsupported"
    with pytest.raises(NotImplementedError):
        decode(q, k, v)


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = (x.to("cuda:1") for x in tensors())
    out = decode(q, k, v)
    assert torch.cuda.current_device() == 0
    attention(q, k, v, dtype="bfloat16").check(out)

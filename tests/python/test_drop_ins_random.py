"""flash_attn_with_kvcache() and FlashInfer's wrappers over random calls: what tests of one argument each do not put together."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import needs  # noqa: E402
from oracle import attention  # noqa: E402
from pages import csr  # noqa: E402

from lean_attention.compat import flashinfer  # noqa: E402
from lean_attention.compat.flash_attn import flash_attn_with_kvcache  # noqa: E402

SEEDS = 60
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
#: How far turned queries and keys may be rounded apart from float64's: a few units of the type.
TURNED = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}


class Draw:
    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        self._torch = torch.Generator().manual_seed(seed)

    def below(self, end, begin=0):
        return int(self._random.integers(begin, end))

    def pick(self, *choices):
        return choices[self.below(len(choices))]

    def normal(self, *shape):
        return torch.randn(*shape, generator=self._torch)

    def order(self, count):
        return torch.randperm(count, generator=self._torch)


def begins(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


def turned(x, cos, sin, interleaved):
    """x [n, H, d] in float64 by cos, sin [n, rotary_dim / 2]."""
    dim, result = 2 * cos.shape[-1], x.clone()
    pairs = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    (a, b), c, s = (x[..., half] for half in pairs), cos[:, None].double(), sin[:, None].double()
    result[..., pairs[0]], result[..., pairs[1]] = a * c - b * s, a * s + b * c
    return result


def expected_of(q, k, v, dtype, sinks, slack, **rules):
    """The oracle's answer for one sequence of q, k, v [n, H, d]."""
    answer = attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), sinks=sinks, dtype=str(dtype).removeprefix("torch."), **rules)
    if sinks is not None:  # of a row without keys the sink is what is left
        answer.lse = np.where(np.isneginf(answer.lse), sinks.numpy()[None, :, None], answer.lse)
        answer.allowed_lse = answer.allowed_lse + 1e-5
    answer.allowed, answer.allowed_lse = answer.allowed * (3 if slack else 1) + slack, answer.allowed_lse + slack + 1e-6
    if dtype == torch.float16:
        answer.allowed = answer.allowed + 2.0**-24  # what its smallest numbers lie apart
    return answer


def check(expected, out, lse):
    """out [n, Hq, d], lse [Hq, n]"""
    expected.check(out.transpose(0, 1)[None], lse[None])


def mask_of_chunks(chunk, length, own, pad, capacity):
    position = length - own + np.arange(own)[:, None] - pad
    return ((np.arange(capacity) - pad) // chunk == position // chunk)[None, None]


@needs("append", "pages", "window", "softcap", "alibi", "sinks", "mask")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_flash_attn_with_kvcache(seed):
    draw = Draw(seed)
    batch, kv_heads, dim, dtype = draw.pick(1, 2, 4), draw.below(4, 1), draw.pick(8, 16, 40, 64), draw.pick(*DTYPES)
    q_heads, capacity = kv_heads * draw.pick(1, 2, 4), draw.pick(24, 48, 96)
    packed, appends = draw.below(3) == 0, bool(draw.below(2))
    tokens = draw.pick(1, 1, 2, 5)
    own = [draw.below(6, 1) for _ in range(batch)] if packed else [tokens] * batch
    as_many = not appends or draw.below(2)
    fresh = own if as_many else [draw.below(5, 1) for _ in range(batch)] if packed else [draw.below(6, 1)] * batch
    cached = [draw.below(capacity - 8, 1) for _ in range(batch)]
    lengths = [have + (new if appends else 0) for have, new in zip(cached, fresh)]
    pads = [draw.below(1 + max(0, min(have, length - n))) for have, length, n in zip(cached, lengths, own)]
    rules = dict(causal=bool(draw.below(2)), softcap=draw.pick(0.0, 4.0))
    window = draw.pick((-1, -1), (-1, -1), (draw.below(30), draw.below(4)), (draw.below(9), -1))
    chunk = draw.pick(0, 7) if window == (-1, -1) else 0
    scale, sinks = draw.pick(None, 0.3), draw.normal(q_heads) if draw.below(3) == 0 else None
    slopes = draw.pick(None, draw.normal(q_heads).abs(), draw.normal(batch, q_heads).abs())
    rows = draw.order(batch + 2)[:batch]
    cache_k, cache_v = (draw.normal(batch + 2, capacity, kv_heads, dim).to(dtype) for _ in range(2))
    q = [draw.normal(n, q_heads, dim).to(dtype) for n in own]
    new_k, new_v = ([draw.normal(n, kv_heads, dim).to(dtype) for n in fresh] for _ in range(2))
    half = draw.pick(1, 2, dim // 4, dim // 2)
    rotary = (draw.normal(capacity + 8, half), draw.normal(capacity + 8, half), bool(draw.below(2))) if appends and draw.below(2) else None
    turn = (lambda x, at: turned(x.double(), rotary[0][at], rotary[1][at], rotary[2]).to(dtype)) if rotary else (lambda x, at: x)

    written_k, written_v, expected = cache_k.clone(), cache_v.clone(), []
    for b, row in enumerate(rows):
        places = cached[b] + torch.arange(fresh[b])
        if appends:
            written_k[row, places], written_v[row, places] = turn(new_k[b], places), new_v[b]
        advances = rules["causal"] or window != (-1, -1)
        of_q = cached[b] + (torch.arange(own[b]) if advances else torch.zeros(own[b], dtype=torch.long))
        mask = mask_of_chunks(chunk, lengths[b], own[b], pads[b], capacity) if chunk else None
        answer = expected_of(
            turn(q[b], of_q).double(), written_k[row].double(), written_v[row].double(), dtype, sinks, TURNED[dtype] if rotary else 0.0,
            seqlens=[lengths[b]], leftpad=[pads[b]], window=window, scale=scale, mask=mask, **rules,
            alibi_slopes=None if slopes is None else slopes if slopes.dim() == 1 else slopes[b],
        )  # fmt: skip
        expected.append(answer)

    given = dict(
        rules, cache_seqlens=torch.tensor(cached, dtype=torch.int32), cache_leftpad=torch.tensor(pads, dtype=torch.int32),
        cache_batch_idx=rows.int(), window_size=window, attention_chunk=chunk, softmax_scale=scale, s_aux=sinks, alibi_slopes=slopes,
        return_softmax_lse=True,
    )  # fmt: skip
    join = torch.cat if packed else torch.stack
    if packed:
        given.update(cu_seqlens_q=begins(own), max_seqlen_q=max(own))
    if appends:
        given.update(k=join(new_k), v=join(new_v))
        if packed and not as_many:
            given.update(cu_seqlens_k_new=begins(fresh))
    if rotary:
        given.update(zip(("rotary_cos", "rotary_sin", "rotary_interleaved"), rotary))
    page = draw.pick(None, 4, 8)
    if page:  # the same rows, dealt out to pages
        table = draw.order(cache_k.shape[0] * capacity // page).view(-1, capacity // page)
        pools = [torch.empty(table.numel(), page, kv_heads, dim, dtype=dtype) for _ in range(2)]
        for pool, cache in zip(pools, (cache_k, cache_v)):
            pool[table] = cache.unflatten(1, (-1, page))
        given.update(block_table=table.int())
    else:
        pools = [cache_k, cache_v]
    out, lse = flash_attn_with_kvcache(join(q), *pools, **given)
    if packed:
        out, lse = out.split(own), lse.split(own, 1)
    for answer, o, its_lse in zip(expected, out, lse):
        check(answer, o, its_lse)
    for pool, written in zip(pools, (written_k, written_v)):
        found = pool[table].flatten(1, 2) if page else pool
        torch.testing.assert_close(found, written, rtol=0, atol=TURNED[dtype] if rotary else 0)


def slopes_of(heads):
    """ALiBi's own (arXiv 2108.12409)."""
    whole = 2 ** int(math.log2(heads))
    return [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)] + [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


@needs("pages", "window", "softcap", "alibi", "sinks")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_flashinfer_wrappers(seed):
    draw = Draw(seed)
    kind = draw.pick("decode", "several", "prefill", "ragged")
    batch, kv_heads, dim, dtype = draw.pick(1, 2, 4), draw.below(4, 1), draw.pick(8, 16, 64), draw.pick(*DTYPES)
    q_heads, page, layout = kv_heads * draw.below(4, 1), draw.pick(1, 3, 8), draw.pick("NHD", "HND")
    each = {"decode": 1, "several": draw.below(5, 2)}.get(kind)
    own = [draw.below(6) if each is None else each for _ in range(batch)]
    causal = {"decode": False, "several": True}.get(kind, bool(draw.below(2)))
    mode = draw.pick("NONE", "NONE", "ROPE_LLAMA", "ALIBI" if causal or kind == "decode" else "NONE")
    lengths = [draw.below(50, n if mode == "ROPE_LLAMA" else 0) for n in own]
    window, softcap, scale, theta = draw.pick(-1, -1, draw.below(20)), draw.pick(None, 3.0), draw.pick(None, 0.4), draw.pick(None, 5e3)
    softcap = None if mode == "ALIBI" else softcap
    sinks = draw.normal(q_heads) if draw.below(3) == 0 else None
    q_scale, v_scale = draw.pick(None, 0.5), draw.pick(None, 2.0)
    q = [draw.normal(n, q_heads, dim).to(dtype) for n in own]
    k, v = ([draw.normal(n, kv_heads, dim).to(dtype) for n in lengths] for _ in range(2))

    def turn(x, positions):
        if mode != "ROPE_LLAMA":
            return x.double()
        angles = positions.double()[:, None] * (theta or 1e4) ** (-torch.arange(dim // 2).double() / (dim // 2))
        return turned(x.double(), angles.cos(), angles.sin(), False).to(dtype).double()

    expected = [
        expected_of(
            turn(q[b], lengths[b] - own[b] + torch.arange(own[b])), turn(k[b], torch.arange(lengths[b])), v[b].double() * (v_scale or 1),
            dtype, sinks, TURNED[dtype] if mode == "ROPE_LLAMA" else 0.0, causal=causal, window=(window, -1), softcap=softcap or 0.0,
            scale=(scale or dim**-0.5) * (q_scale or 1), alibi_slopes=slopes_of(q_heads) if mode == "ALIBI" else None,
        )
        for b in range(batch)
    ]  # fmt: skip

    plan = dict(pos_encoding_mode=mode, window_left=window, logits_soft_cap=softcap, sm_scale=scale, rope_theta=theta)
    heads = (q_heads, kv_heads, dim)
    if kind == "ragged":
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, layout)
        wrapper.plan(begins(own), begins(lengths), *heads, causal=causal, **plan)
        keys = [torch.cat(x) if layout == "NHD" else torch.cat(x).transpose(0, 1) for x in (k, v)]
    else:
        table = draw.order(batch * -(-50 // page) + 2)[:-2].view(batch, -1)
        cache = torch.full((table.numel() + 2, 2, page, kv_heads, dim), math.nan, dtype=dtype)  # pages nobody owns hold NaN
        for b, length in enumerate(lengths):
            for token in range(length):
                cache[table[b, token // page], :, token % page] = torch.stack((k[b][token], v[b][token]))
        keys = [cache if layout == "NHD" else cache.transpose(2, 3).contiguous()]
        tables = csr(table.int(), lengths, page)
        if kind == "prefill":
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, layout)
            wrapper.plan(begins(own), *tables, *heads, page, causal=causal, **plan)
        else:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, layout)
            wrapper.plan(*tables, *heads, page, q_len_per_req=each, **plan)
    base, of_lse = draw.pick("log2", "ln"), draw.pick("NH", "HN")
    asked = dict(q_scale=q_scale, v_scale=v_scale, sinks=sinks, lse_base=base, lse_layout=of_lse)
    out, lse = wrapper.run(torch.cat(q), *keys, return_lse=True, **asked)
    lse = (lse.t() if of_lse == "NH" else lse) / (math.log2(math.e) if base == "log2" else 1)
    for answer, o, its_lse in zip(expected, out.split(own), lse.split(own, 1)):
        answer.allowed = answer.allowed + np.abs(answer.out) * (torch.finfo(dtype).eps if v_scale else 0)  # rounded again
        check(answer, o, its_lse)

"""Paged K/V without a page, tables without a column, batches without a sequence or a query token, through every door."""

import pytest

torch = pytest.importorskip("torch")

from conftest import needs  # noqa: E402

import lean_attention  # noqa: E402
from lean_attention import _vllm_call  # noqa: E402
from lean_attention.compat import flash_attn, flash_mla, flashinfer  # noqa: E402

pytestmark = needs("pages")
HEADS, DIM, VALUE_DIM, PAGE = 4, 64, 32, 16


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int32)


class Empty:
    """Nothing but queries: `batch` sequences without a token, a pool of `pages`, a table of as many `columns`."""

    def __init__(self, batch, pages, columns):
        self.batch, self.q = batch, torch.randn(batch, 1, HEADS, DIM)
        self.rows = self.q.reshape(-1, HEADS, DIM)
        self.k, self.v = torch.zeros(pages, PAGE, 1, DIM), torch.zeros(pages, PAGE, 1, DIM)
        self.table, self.lengths = zeros(batch, columns), zeros(batch)
        self.starts, self.no_pages = torch.arange(batch + 1, dtype=torch.int32), zeros(batch + 1)


def by_decode(e):
    return lean_attention.decode(e.q, e.k, e.v, block_table=e.table, seqlens=e.lengths, layout="bshd", return_lse=True)


def by_list_of_pages(e):
    pages = dict(page_indptr=e.no_pages, page_indices=zeros(0), seqlens=e.lengths)
    return lean_attention.decode(e.q, e.k, e.v, **pages, layout="bshd", return_lse=True)


def by_packed_queries(e):
    packed = dict(cu_seqlens_q=e.starts, max_seqlen_q=1, block_table=e.table, seqlens=e.lengths)
    return lean_attention.decode(e.rows, e.k, e.v, **packed, layout="bshd", return_lse=True)


def by_flash_mla(e):
    return flash_mla.flash_mla_with_kvcache(e.q, e.k, e.table, e.lengths, VALUE_DIM)


def by_flash_attn_with_kvcache(e):
    return flash_attn.flash_attn_with_kvcache(
        e.q, e.k, e.v, cache_seqlens=e.lengths, block_table=e.table, causal=True, return_softmax_lse=True
    )


def by_flash_attn_varlen(e):
    return flash_attn.flash_attn_varlen_func(e.rows, e.k, e.v, e.starts, e.no_pages, 1, 1, block_table=e.table, causal=True), None


def by_flashinfer_decode(e):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8), "NHD")
    types = dict(q_data_type=torch.float32, kv_data_type=torch.float32)
    wrapper.plan(e.no_pages, zeros(0), e.lengths, HEADS, 1, DIM, PAGE, **types)
    return wrapper.run(e.rows, (e.k, e.v), return_lse=True)


def by_flashinfer_prefill(e):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8), "NHD")
    types = dict(q_data_type=torch.float32, kv_data_type=torch.float32)
    wrapper.plan(e.starts, e.no_pages, zeros(0), e.lengths, HEADS, 1, DIM, PAGE, causal=True, **types)
    return wrapper.run(e.rows, (e.k, e.v), return_lse=True)


def by_flashinfer_mla(e):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    wrapper.plan(e.starts, e.no_pages, zeros(0), e.lengths, HEADS, 48, 16, PAGE, False, 0.1, torch.float32, torch.float32)
    return wrapper.run(e.rows[..., :48], e.rows[..., 48:], e.k[:, :, 0, :48], e.k[:, :, 0, 48:], return_lse=True)


def by_vllm_layer(e):
    batch = _vllm_call.Batch(len(e.rows), 1, e.starts, 0, e.lengths, e.table, zeros(0).long())
    out = torch.full_like(e.rows, float("nan"))
    _vllm_call.PagedLayer(scale=0.1).attend(e.rows, None, None, (e.k.transpose(1, 2), e.v.transpose(1, 2)), batch, out)
    return out, None


DOORS = {name: door for name, door in list(globals().items()) if name.startswith("by_")}


@pytest.mark.parametrize("batch, pages, columns", [(2, 0, 0), (2, 0, 3), (2, 1, 0), (0, 0, 0), (0, 0, 3), (0, 1, 3)])
@pytest.mark.parametrize("door", DOORS)
def test_sequences_without_a_token_need_no_page(door, batch, pages, columns):
    out, lse = DOORS[door](Empty(batch, pages, columns))
    assert out.shape[0] == batch and out.shape[-2] == HEADS and torch.equal(out, torch.zeros_like(out))
    if lse is not None:
        assert lse.numel() == batch * HEADS and torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_a_token_without_a_page_is_refused():
    e = Empty(2, 0, 3)
    e.lengths[1] = 5
    with pytest.raises(ValueError, match=r"seqlens\[1\] = 5: allowed 0 to 0"):
        by_decode(e)


@pytest.mark.parametrize("batch, pages", [(2, 0), (2, 1), (0, 1)])
def test_a_step_without_a_query_token_gives_none(batch, pages):
    """As many requests as there may be, and no token of any: the longest of no queries is 0."""
    e = Empty(batch, pages, 3)
    step = _vllm_call.Batch(0, 0, zeros(batch + 1), 0, e.lengths, e.table, zeros(0).long())
    out = torch.full_like(e.rows, 7.0)
    _vllm_call.PagedLayer(scale=0.1).attend(e.rows, None, None, (e.k.transpose(1, 2), e.v.transpose(1, 2)), step, out)
    assert torch.equal(out, torch.full_like(out, 7.0))  # rows of no request are not written
    one = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="the sequence must not be longer than max_seqlen_q"):
        lean_attention.decode(
            torch.zeros(1, HEADS, DIM), e.k, e.v, cu_seqlens_q=one, max_seqlen_q=0, block_table=zeros(1, 3), seqlens=zeros(1),
            layout="bshd",
        )  # fmt: skip

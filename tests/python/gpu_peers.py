"""Stand-ins for the packages of bench/peers that need a GPU: functions with the published names and arguments, which compute on the host from
what they are given. A call that gives another package's argument, or the wrong table, fails or is wrong."""

import math
import types

import torch


def attend(q, k, v, scale, causal):
    """q [n_q, Hq, d], k and v [n, Hkv, d] of one sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q)), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


def from_pages(cache, pages, n, layout="NHD"):
    """[n, Hkv, d] of a sequence's pages."""
    found = cache[pages.long()]
    found = found.transpose(1, 2) if layout == "HND" else found
    return found.reshape(-1, *found.shape[2:])[:n]


def split(x, starts):
    return [x[a:b] for a, b in zip(starts.tolist(), starts.tolist()[1:])]


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap):
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    parts = zip(split(q, cu_seqlens_q), split(k, cu_seqlens_k), split(v, cu_seqlens_k), strict=True)
    return torch.cat([attend(*part, softmax_scale, causal) for part in parts])


def with_cache(q, k_cache, v_cache, cache_seqlens, table, scale, causal):
    """q: [n_q, Hq, d] of each sequence."""
    found = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (from_pages(x, table[b], n) if table is not None else x[b, :n] for x in (k_cache, v_cache))
        found.append(attend(q[b], k, v, scale, causal))
    return found


def flash_attn():
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table=None, softmax_scale, causal, window_size, softcap):
        return torch.stack(with_cache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal))

    return {"flash_attn": dict(__version__="2", flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=varlen)}


def flash_attn_interface():
    def flash_attn_varlen_func(*arguments, num_splits, **more):
        return varlen(*arguments, **more)

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale, causal,
                                window_size, softcap, num_splits):
        if cu_seqlens_q is None:
            return torch.stack(with_cache(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal))
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return torch.cat(with_cache(split(q, cu_seqlens_q), k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal))

    return {"flash_attn_interface": dict(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)}


class PagedWrapper:
    def __init__(self, workspace, kv_layout):
        self.layout = kv_layout

    def keep(self, q_starts, indptr, indices, lens, causal, scale):
        self.plan_made = split(indices, indptr), lens, q_starts, causal, scale

    def run(self, q, kv, out):
        pages, lens, starts, causal, scale = self.plan_made
        for b, (part, n) in enumerate(zip(pages, lens, strict=True)):
            k, v = (from_pages(x, part, n, self.layout) for x in kv)
            out[starts[b]:starts[b + 1]] = attend(q[starts[b]:starts[b + 1]], k, v, scale, causal)
        return out


def lens_of(indptr, last, page):
    return [(count - 1) * page + tail for count, tail in zip(indptr.diff().tolist(), last.tolist(), strict=True)]


class Decode(PagedWrapper):
    def __init__(self, workspace, kv_layout, *, use_tensor_cores, backend="auto"):
        super().__init__(workspace, kv_layout)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, sm_scale, q_data_type, kv_data_type):
        lens = lens_of(indptr, last_page_len, page_size)
        self.keep(list(range(len(lens) + 1)), indptr, indices, lens, False, sm_scale)


class Prefill(PagedWrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal,
             sm_scale, q_data_type, kv_data_type):
        self.keep(qo_indptr.tolist(), paged_kv_indptr, paged_kv_indices, lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size), causal, sm_scale)


class Batch(PagedWrapper):
    def __init__(self, *, kv_layout, device):
        self.layout = kv_layout

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, *, causal, sm_scale,
             q_data_type, kv_data_type):
        self.keep(qo_indptr.tolist(), kv_indptr, kv_indices, kv_len_arr.tolist(), causal, sm_scale)

    def run(self, q, kv, *, out, lse):
        return super().run(q, kv, out), lse


class Mla(PagedWrapper):
    def __init__(self, workspace):
        self.layout = "NHD"

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_type, kv_type):
        self.keep(qo_indptr.tolist(), kv_indptr, kv_indices, kv_len_arr.tolist(), causal, sm_scale)

    def run(self, q_nope, q_pe, ckv, kpe, *, out):
        k = torch.cat([ckv, kpe], -1)[:, :, None]
        return super().run(torch.cat([q_nope, q_pe], -1), (k, ckv[:, :, None]), out)


def flashinfer():
    def single(q, k, v, *, kv_layout, sm_scale):
        k, v = (x.transpose(0, 1) if kv_layout == "HND" else x for x in (k, v))
        return attend(q[None], k, v, sm_scale, False)[0]

    def xqa(query, kv_cache, workspace, block_tables, seq_lens, max_seq_len, *, bmm1_scale, bmm2_scale, out, kv_layout):
        assert int(seq_lens.max()) <= max_seq_len and bmm2_scale == 1.0
        for b, n in enumerate(seq_lens.tolist()):
            out[b] = attend(query[b:b + 1], *(from_pages(x, block_tables[b], n, kv_layout) for x in kv_cache), bmm1_scale, False)[0]
        return out

    return {"flashinfer": dict(__version__="0", BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill,
                               BatchAttention=Batch, single_decode_with_kv_cache=single),
            "flashinfer.decode": dict(xqa_batch_decode_with_kv_cache=xqa), "flashinfer.mla": dict(BatchMLAPagedAttentionWrapper=Mla)}


def flash_mla():
    def get_mla_metadata(*_):
        return "schedule", None

    def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, *, softmax_scale, causal):
        assert tile_scheduler_metadata == "schedule" and num_splits is None
        found = with_cache(q, k_cache, k_cache[..., :head_dim_v], cache_seqlens, block_table, softmax_scale, causal)
        return torch.stack(found), None

    def get_mla_metadata_dense_fp8(cache_seqlens, rows, kv_heads):
        assert kv_heads == 1
        return "schedule", "splits"

    def flash_mla_with_kvcache_fp8(q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, softmax_scale, causal, descale_q, descale_k):
        assert (metadata, num_splits) == ("schedule", "splits") and q.dtype == k_cache.dtype == torch.float8_e4m3fn
        q, k = q.float() * descale_q, k_cache.float() * descale_k
        found = with_cache(q.bfloat16(), k.bfloat16(), k[..., :head_dim_v].bfloat16(), cache_seqlens, block_table, softmax_scale, causal)
        return torch.stack(found), None

    of_fp8 = dict(__version__="0", get_mla_metadata_dense_fp8=get_mla_metadata_dense_fp8, flash_mla_with_kvcache_fp8=flash_mla_with_kvcache_fp8)
    return {"flash_mla": dict(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache), "flash_mla_fp8": of_fp8}


def hpc():
    def attention_decode_bf16(q, kcache, vcache, block_ids, num_seq_kvcache, mtp=0, new_kv_included=False, splitk=True, task_map=None,
                              split_flag=None, output=None):
        assert mtp == 0 and splitk and task_map is None and split_flag is None
        lens = num_seq_kvcache + (0 if new_kv_included else 1)
        for pool in (kcache, vcache):  # as the library asks
            for row, n in zip(block_ids.tolist(), lens.tolist(), strict=True):
                page = pool.shape[1]
                assert n % page == 0 or not pool[row[n // page], n % page:].any(), "slots behind a sequence's end are not 0"
        output.copy_(torch.cat(with_cache(q[:, None], kcache, vcache, lens, block_ids, q.shape[-1] ** -0.5, False)))
        return output

    return {"hpc": dict(attention_decode_bf16=attention_decode_bf16)}


def modules() -> dict:
    """Name -> module, of all of them; parts of a package are its attributes too."""
    found = {}
    for make in (flash_attn, flash_attn_interface, flashinfer, flash_mla, hpc):
        for name, contents in make().items():
            found[name] = types.ModuleType(name)
            vars(found[name]).update(contents)
            package, _, part = name.rpartition(".")
            if package:
                setattr(found[package], part, found[name])
    return found

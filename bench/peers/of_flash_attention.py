"""FlashAttention-2 (flash_attn), FlashAttention-3 (flash_attn_interface), and FlashAttention-3 of the kit lean_peers_fa3."""
import importlib.metadata

import torch

from peers import Peer, Prepared
from peers.rows import Form


def version_of(*packages: str) -> str:
    """The version of the first of them that is installed, "?" if none is."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


def windows(row) -> tuple:
    return tuple(row.feature("window", (-1, -1)))


class FlashAttention2(Peer):
    name = "flash-attn-2"
    features = ("window", "softcap")
    pages = (256,)  # its pages are multiples of 256 tokens

    def __init__(self, device, threads):
        import flash_attn

        self.library, self.impl = flash_attn, f"flash-attn-{flash_attn.__version__}/fa2"

    def refuses(self, row):
        if row.form.page and row.form.page % 256:
            return f"pages of {row.form.page} tokens: takes multiples of 256"
        return "d above 256" if row.head_dim > 256 else None

    def forms(self, row):
        if row.form.page:
            return [Form("nhd", row.form.page)] if row.even_queries else []
        if row.even_queries:
            return [Form("bshd"), *([] if row.uniform else [Form("thd")])]
        return [Form("thd")]

    def prepare(self, row, tensors):
        shared = dict(softmax_scale=row.scale, causal=row.causal, window_size=windows(row), softcap=row.feature("softcap", 0.0))
        if tensors.form.kind == "thd":
            starts = tensors.q_starts, tensors.kv_starts, max(row.n_q), row.longest
            return Prepared(lambda i: self.library.flash_attn_varlen_func(tensors.q, tensors.k[i], tensors.v[i], *starts, **shared))
        if row.form.page:
            shared["block_table"] = tensors.table
        return Prepared(lambda i: self.library.flash_attn_with_kvcache(tensors.q_bshd, tensors.k[i], tensors.v[i],
                                                                       cache_seqlens=tensors.lens, **shared))


class FlashAttention3(Peer):
    """Its tile schedule is made ahead where it can be: that is the plan."""

    name = "flash-attn-3"
    features = ("window", "softcap")
    narrow_values = True

    def __init__(self, device, threads):
        import flash_attn_interface

        self.library = flash_attn_interface
        self.impl = f"flash-attn-{version_of('flash_attn_3', 'flash-attn-3', 'tokenspeed-fa3')}/fa3"  # tokenspeed-fa3 is a build of it

    def refuses(self, row):
        return "d above 256" if row.head_dim > 256 else None

    def forms(self, row):
        if row.form.page:
            return [Form("nhd", row.form.page)]
        return [Form("bshd"), Form("nhd", 128)] if row.even_queries else [Form("thd")]

    def prepare(self, row, tensors):
        shared = dict(softmax_scale=row.scale, causal=row.causal, window_size=windows(row), softcap=row.feature("softcap", 0.0), num_splits=0)
        if tensors.form.kind == "thd":
            starts = tensors.q_starts, tensors.kv_starts, max(row.n_q), row.longest
            return Prepared(lambda i: self.library.flash_attn_varlen_func(tensors.q, tensors.k[i], tensors.v[i], *starts, **shared))
        shared["cache_seqlens"] = tensors.lens
        q = tensors.q if not row.even_queries else tensors.q_bshd
        if not row.even_queries:
            shared |= dict(cu_seqlens_q=tensors.q_starts, max_seqlen_q=max(row.n_q))
        if tensors.form.page:
            shared["page_table"] = tensors.table
        return Prepared(lambda i: self.library.flash_attn_with_kvcache(q, tensors.k[i], tensors.v[i], **shared))


class Fa3Kit(Peer):
    """FlashAttention-3 of one query token, from a folder that `--kit` names. `build`: whose."""

    build: str

    def __init__(self, device, threads):
        import lean_peers_fa3

        self.fa3, self.impl = lean_peers_fa3, f"{lean_peers_fa3.load(self.build)}/fa3"

    def refuses(self, row):
        return None if row.decodes else "the kit's function takes one query token"

    def forms(self, row):
        if row.form.page:
            return [Form("nhd", row.form.page, how) for how in ("schedule made in the call", "schedule made ahead")]
        places = [("bshd", 0), ("nhd", 128), *([] if row.uniform else [("thd", 0)])]
        return [Form(kind, page, how) for kind, page in places
                for how in ("schedule made in the call", "schedule made ahead", "schedule made ahead, pack_gqa")]

    def prepare(self, row, tensors):
        how, made = tensors.form.how, {}
        shared = {"impl": self.build, "pack_gqa": True if "pack_gqa" in how else None}
        if tensors.form.kind == "thd":
            shared |= dict(cu_seqlens_k=tensors.kv_starts, max_seqlen_k=row.longest)
        if tensors.form.page:
            shared["page_table"] = tensors.table
        queries = tensors.q_starts if tensors.form.kind == "thd" else None

        def plan():
            made["scheduler_metadata"] = self.fa3.fa3_metadata(tensors.q, tensors.k[0], tensors.lens, **shared)

        def call(i):
            return self.fa3.fa3_decode(tensors.q, tensors.k[i], tensors.v[i], tensors.lens, cu_seqlens_q=queries, softmax_scale=row.scale,
                                       **made, **shared)

        return Prepared(call, plan if "ahead" in how else None)


class Fa3OfVllm(Fa3Kit):
    """vLLM's build. Several query tokens, as many of each sequence, windows, softcaps and float8 by its operator, since the kit's function does
    not pass them on; the schedule is made in the call. Of float8 it takes queries rounded likewise, ahead of the clock."""

    name, build = "fa3-vllm", "vllm"
    kv_dtypes = ("fp8_e4m3",)
    features = ("window", "softcap")

    def refuses(self, row):
        return None if row.even_queries else "query tokens differ"

    def forms(self, row):
        if not row.decodes:
            return [Form("nhd", row.form.page)] if row.form.page else [Form("bshd"), Form("nhd", 128)]
        return [form for form in super().forms(row) if self.by_function(row) or form.how == "schedule made in the call"]

    def by_function(self, row) -> bool:
        return row.decodes and not row.features and row.kv_dtype == row.dtype

    def prepare(self, row, tensors):
        if self.by_function(row):
            return super().prepare(row, tensors)
        operator = self.fa3._operators(self.build).fwd
        packed = tensors.form.kind == "thd"
        queries = (tensors.q if packed else tensors.q_bshd).to(tensors.kv_dtype)
        queries_at, keys_at, n_q, longest = (tensors.q_starts, tensors.kv_starts, 1, row.longest) if packed else (None, None, None, None)
        table = tensors.table if tensors.form.page else None

        def call(i):
            return operator(queries, tensors.k[i], tensors.v[i], None, None, None, None, queries_at, keys_at, None, None, tensors.lens, n_q,
                            longest, table, None, None, None, None, None, None, None, None, row.scale, row.causal, *windows(row),
                            row.feature("softcap", 0.0), True, None, 0, None, 0, None, 1, 0, None)[0].view(*tensors.q.shape)

        return Prepared(call)


class Fa3Upstream(Fa3Kit):
    """The build of upstream's sources, whose operator takes several query tokens as well."""

    name, build = "fa3-tokenspeed", "tokenspeed"

    def refuses(self, row):
        return None if row.even_queries else "query tokens differ"

    def forms(self, row):
        return super().forms(row) if row.decodes else [Form("nhd", row.form.page)] if row.form.page else [Form("bshd"), Form("nhd", 128)]

    def prepare(self, row, tensors):
        if row.decodes:
            return super().prepare(row, tensors)
        pages = {"page_table": tensors.table} if tensors.form.page else {}
        return Prepared(lambda i: torch.ops.flash_attn_3.fwd(tensors.q_bshd, tensors.k[i], tensors.v[i], seqused_k=tensors.lens,
                                                             softmax_scale=row.scale, is_causal=row.causal, num_splits=0, pack_gqa=True, **pages)[0])


PEERS = (FlashAttention2, FlashAttention3, Fa3OfVllm, Fa3Upstream)

"""This library, through its Python package: K and V where the row has them, the workspace that the package keeps."""
import torch

from peers import Peer, Prepared
from peers.tensors import offsets


class Lean(Peer):
    name = "lean"
    impl = "lean"
    devices = ("cuda", "cpu")
    dtypes = ("fp32", "fp16", "bf16")
    kv_dtypes = ("fp8_e4m3", "fp8_e5m2")
    features = ("window", "softcap", "alibi", "sinks", "mask", "tree")
    options: dict = {}

    def __init__(self, device: str, threads: int):
        import lean_attention

        self.decode, self.version = lean_attention.decode, lean_attention.__version__
        self.options = {"options": lean_attention.Options(**self.options)} if self.options else {}

    def supports(self, row):
        return row.unknown or None

    def forms(self, row):
        return [row.form]

    def prepare(self, row, tensors):
        q, out, result, layout = self.queries(row, tensors)
        arguments = dict(causal=row.causal, scale=row.scale, layout=layout, **self.options, **self.rules(row, tensors), **self.places(row, tensors))
        k, v = tensors.k, tensors.v

        def call(i):
            self.decode(q, k[i], v[i], out=out, **arguments)
            return result

        return Prepared(call)

    def packs_queries(self, row) -> bool:
        return not row.even_queries or row.form.kind in ("thd", "htd") and not row.decodes

    def queries(self, row, tensors):
        """q and out in the order of axes that K and V have, the memory that out is a view of, and the order's name."""
        result = tensors.output()
        q, out = tensors.q, result
        if not self.packs_queries(row) and not row.decodes:
            q, out = tensors.q_bshd, result.view(*tensors.q_bshd.shape[:3], row.value_dim)
        if row.form.kind in ("bshd", "thd", "nhd"):
            return q, out, result, "bshd"
        if not row.decodes:
            q, out = q.transpose(-3, -2), out.transpose(-3, -2)
        return q, out, result, "bhsd"

    def rules(self, row, tensors):
        made = {"alibi": ("alibi_slopes", "slopes"), "sinks": ("sinks", "sinks"), "tree": ("tree_mask", "tree_words")}
        rules = dict((made[name][0], getattr(tensors, made[name][1])) if name in made else (name, value) for name, value in row.features)
        return rules | ({"mask": tensors.mask.expand(-1, row.q_heads, -1, -1)} if "mask" in rules else {})

    def places(self, row, tensors):
        arguments = {}
        if row.form.kind in ("thd", "htd"):
            arguments |= dict(cu_seqlens_k=tensors.kv_starts, max_seqlen_k=row.longest)
        else:
            arguments |= dict(seqlens=tensors.lens)
        if row.form.page:
            arguments |= dict(block_table=tensors.table)
        if self.packs_queries(row):
            arguments |= dict(cu_seqlens_q=tensors.q_starts, max_seqlen_q=max(row.n_q))
        return arguments


class StreamOrder(Lean):
    """Without programmatic dependent launch: a call starts when the one ahead of it has ended, as cuDNN's kernels and FlashAttention's do."""

    name = "lean-stream-order"
    impl = "lean/stream_order"
    devices = ("cuda",)
    options = {"dependent_launch": False}


class TwoCalls(Lean):
    """A mixed batch as two calls: the chunks, then the rows of one query token."""

    name = "lean-two-calls"
    impl = "lean/two_calls"

    def supports(self, row):
        if row.even_queries or row.form.kind != "thd":
            return "of mixed batches end to end"
        return row.unknown or (None if list(row.n_q) == sorted(row.n_q, reverse=True) else "chunks first")

    def prepare(self, row, tensors):
        cut = sum(n > 1 for n in row.n_q)
        result, parts = tensors.output(), []
        for compute, begin, end in ((self.compute_chunks, 0, cut), (self.decode, cut, row.batch)):
            tokens, keys = (slice(sum(counts[:begin]), sum(counts[:end])) for counts in (row.n_q, row.lens))
            parts.append((compute, tensors.q[tokens], result[tokens], keys, dict(
                cu_seqlens_q=offsets(row.n_q[begin:end], tensors.device), cu_seqlens_k=offsets(row.lens[begin:end], tensors.device),
                max_seqlen_q=max(row.n_q[begin:end]), max_seqlen_k=max(row.lens[begin:end]), causal=row.causal, scale=row.scale, layout="bshd")))

        def call(i):
            for compute, q, out, keys, arguments in parts:
                compute(q, tensors.k[i][keys], tensors.v[i][keys], out=out, **arguments)
            return result

        return Prepared(call)

    def compute_chunks(self, *tensors, **arguments):
        self.decode(*tensors, **arguments)


class ChunksByFlashAttention3(TwoCalls):
    """The same with the chunks by FlashAttention-3, the operator of the kit's build."""

    name = "fa3-then-lean"
    devices = ("cuda",)
    dtypes = ("fp16", "bf16")
    kv_dtypes = ()
    features = ()

    def __init__(self, device, threads):
        import lean_peers_fa3

        super().__init__(device, threads)
        self.impl = f"{lean_peers_fa3.load('tokenspeed')}/fa3-then-lean"

    def supports(self, row):
        return super().supports(row) or Peer.supports(self, row)

    def compute_chunks(self, q, k, v, *, out, causal, scale, layout, **lengths):
        torch.ops.flash_attn_3.fwd(q, k, v, out=out, softmax_scale=scale, is_causal=causal, num_splits=0, **lengths)


PEERS = (Lean, StreamOrder, TwoCalls, ChunksByFlashAttention3)

"""This library, through its Python package: K and V where the row has them, the workspace that the package keeps."""
from peers import Peer, Prepared


class Lean(Peer):
    name = "lean"
    impl = "lean"
    devices = ("cuda", "cpu")
    dtypes = ("fp32", "fp16", "bf16")
    kv_dtypes = ("fp8_e4m3", "fp8_e5m2")
    features = ("window", "softcap")

    def __init__(self, device: str, threads: int):
        import lean_attention

        self.decode, self.version = lean_attention.decode, lean_attention.__version__

    def supports(self, row):
        return row.unknown or None

    def forms(self, row):
        return [row.form]

    def prepare(self, row, tensors):
        q, out, result, layout = self.queries(row, tensors)
        arguments = dict(causal=row.causal, scale=row.scale, layout=layout, **dict(row.features), **self.places(row, tensors))
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


PEERS = (Lean,)

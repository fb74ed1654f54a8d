"""MLA on a latent cache of 576, V its first 512: DeepSeek's FlashMLA, and FlashInfer's."""
import torch

from peers import Peer, Prepared
from peers.of_flash_attention import version_of


class Mla(Peer):
    dtypes = ("bf16", "fp16")

    def supports(self, row):
        if row.unknown:
            return row.unknown
        if (row.head_dim, row.value_dim, row.kv_heads) != (576, 512, 1):
            return "MLA alone: one K/V head of 576, V its first 512"
        if row.form.kind != "nhd" or not row.even_queries:
            return "pages, and as many query tokens of each sequence"
        return None if row.dtype in self.dtypes and row.kv_dtype == row.dtype else f"{row.kv_dtype}: not called so here"

    def forms(self, row):
        return [row.form]


class FlashMla(Mla):
    name = "flash-mla"

    def __init__(self, device, threads):
        import flash_mla

        self.library, self.impl = flash_mla, f"flash-mla-{version_of('flash_mla')}/flash_mla"

    def supports(self, row):
        return super().supports(row) or (None if row.form.page == 64 else "pages of 64")

    def prepare(self, row, tensors):
        made = {}

        def plan():  # of the newest interface empty, and filled by the first call
            made["plan"] = self.library.get_mla_metadata(tensors.lens, row.n_q[0] * row.q_heads, 1)

        def call(i):
            return self.library.flash_mla_with_kvcache(tensors.q_bshd, tensors.k[i], tensors.table, tensors.lens, row.value_dim, *made["plan"],
                                                       softmax_scale=row.scale, causal=row.causal)[0]

        return Prepared(call, plan, first_call_plans=True)


class FlashInferMla(Mla):
    name = "flashinfer-mla"

    def __init__(self, device, threads):
        import flashinfer
        import flashinfer.mla

        self.library, self.impl = flashinfer, f"flashinfer-{flashinfer.__version__}/mla"
        self.wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(512 << 20, dtype=torch.uint8, device=device))

    def prepare(self, row, tensors):
        latent, out = row.value_dim, tensors.output()
        q_nope, q_pe = (x.contiguous() for x in (tensors.q[..., :latent], tensors.q[..., latent:]))
        caches = [(k[:, :, 0, :latent], k[:, :, 0, latent:]) for k in tensors.k]

        def plan():
            self.wrapper.plan(tensors.q_starts, tensors.page_starts.to(tensors.device), tensors.page_ids, tensors.lens, row.q_heads, latent,
                              row.head_dim - latent, tensors.form.page, row.causal, row.scale, tensors.dtype, tensors.dtype)

        return Prepared(lambda i: self.wrapper.run(q_nope, q_pe, *caches[i], out=out), plan)


PEERS = (FlashMla, FlashInferMla)

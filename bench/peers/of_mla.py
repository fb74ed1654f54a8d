"""MLA on a latent cache of 576, V its first 512: DeepSeek's FlashMLA, and FlashInfer's."""
import torch

from peers import Peer, Prepared
from peers.of_flash_attention import version_of


class Mla(Peer):
    dtypes = ("bf16", "fp16")
    kv_dtype = ""  # the queries' own

    def supports(self, row):
        if row.unknown:
            return row.unknown
        if (row.head_dim, row.value_dim, row.kv_heads) != (576, 512, 1):
            return "MLA alone: one K/V head of 576, V its first 512"
        if row.form.kind != "nhd" or not row.even_queries:
            return "pages, and as many query tokens of each sequence"
        return None if row.dtype in self.dtypes and row.kv_dtype == (self.kv_dtype or row.dtype) else f"{row.kv_dtype}: not called so here"

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


class FlashMlaFp8(FlashMla):
    """vLLM's copy of FlashMLA for float8 rows with one scale. It multiplies float8, so queries are rounded to it ahead of the clock."""

    name = "flash-mla-fp8"
    dtypes = ("bf16",)
    kv_dtype = "fp8_e4m3"

    def __init__(self, device, threads):
        import flash_mla_fp8  # two functions of vllm/v1/attention/ops/flashmla.py over vLLM's _flashmla_extension_C

        self.library, self.impl = flash_mla_fp8, f"flash-mla-{flash_mla_fp8.__version__}/fp8"
        self.one = torch.ones(1, device=device)

    def prepare(self, row, tensors):
        q, made = tensors.q_bshd.to(torch.float8_e4m3fn), {}

        def plan():
            made["plan"] = self.library.get_mla_metadata_dense_fp8(tensors.lens, row.n_q[0] * row.q_heads, 1)

        def call(i):
            return self.library.flash_mla_with_kvcache_fp8(q, tensors.k[i], tensors.table, tensors.lens, row.value_dim, *made["plan"], row.scale,
                                                           row.causal, self.one, self.one)[0]

        return Prepared(call, plan)


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


PEERS = (FlashMla, FlashMlaFp8, FlashInferMla)

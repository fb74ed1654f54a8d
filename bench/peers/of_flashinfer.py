"""FlashInfer's kernels: decode on CUDA cores and on tensor cores, the persistent BatchAttention, one sequence, TensorRT-LLM's XQA, and its
prefill on pages for chunks and mixed batches. plan() is host work that is repeated at each new length; it is timed apart."""
import torch

from peers import Peer, Prepared
from peers.rows import Form

WORKSPACE_BYTES = 3 << 30  # BatchAttention's own 384 MB suffice up to 10 K/V heads of 128; 56 need 2.2 GB


class FlashInfer(Peer):
    kernel: str
    kv_dtypes = ("fp8_e4m3",)
    pages = (16, 64)

    def __init__(self, device, threads):
        import flashinfer
        import flashinfer.decode

        self.library, self.device, self.impl = flashinfer, device, f"flashinfer-{flashinfer.__version__}/{self.kernel}"
        self.wrappers = {}

    def workspace(self) -> torch.Tensor:
        """A kernel's own: XQA keeps counters in its workspace, which must be 0 at first."""
        if "workspace" not in self.wrappers:
            self.wrappers["workspace"] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return self.wrappers["workspace"]

    def forms(self, row):
        return [Form(kind, page) for page in ((row.form.page,) if row.form.page else self.pages) for kind in ("hnd", "nhd")]

    def wrapper(self, form: Form):
        """One for each form: a wrapper's plan lies in its own memory, where the next plan would take its place under graphs that were
        captured with it."""
        if form not in self.wrappers:
            self.wrappers[form] = self.make_wrapper(form.kind.upper())
        return self.wrappers[form]

    def types(self, tensors) -> dict:
        return {"q_data_type": tensors.dtype, "kv_data_type": tensors.kv_dtype}


class Decode(FlashInfer):
    options: dict

    def refuses(self, row):
        return None if row.decodes else "one query token a sequence"

    def make_wrapper(self, layout):
        return self.library.BatchDecodeWithPagedKVCacheWrapper(self.workspace(), layout, **self.options)

    def prepare(self, row, tensors):
        wrapper, out = self.wrapper(tensors.form), tensors.output()

        def plan():
            wrapper.plan(tensors.page_starts, tensors.page_ids, tensors.last_page_lens, row.q_heads, row.kv_heads, row.head_dim,
                         tensors.form.page, sm_scale=row.scale, **self.types(tensors))

        return Prepared(lambda i: wrapper.run(tensors.q, (tensors.k[i], tensors.v[i]), out=out), plan)


class CudaCores(Decode):
    name, kernel, options = "flashinfer-cc", "cc", {"use_tensor_cores": False}


class TensorCores(Decode):
    name, kernel, options = "flashinfer-tc", "tc", {"use_tensor_cores": True, "backend": "fa2"}


class Batch(FlashInfer):
    name, kernel = "flashinfer-batch", "batch"

    def make_wrapper(self, layout):
        wrapper = self.library.BatchAttention(kv_layout=layout, device=self.device)
        wrapper.float_workspace_buffer = self.workspace()
        return wrapper

    def prepare(self, row, tensors):
        wrapper, out = self.wrapper(tensors.form), tensors.output()
        lse = torch.empty(tensors.q.shape[:2], dtype=torch.float32, device=tensors.device)
        queries, lens = tensors.q_starts.cpu(), tensors.lens.cpu()

        def plan():
            wrapper.plan(queries, tensors.page_starts, tensors.page_ids, lens, row.q_heads, row.kv_heads, row.head_dim, row.head_dim,
                         tensors.form.page, causal=row.causal, sm_scale=row.scale, **self.types(tensors))

        return Prepared(lambda i: wrapper.run(tensors.q, (tensors.k[i], tensors.v[i]), out=out, lse=lse)[0], plan)


class Single(FlashInfer):
    name, kernel, kv_dtypes = "flashinfer-single", "single", ()

    def refuses(self, row):
        if row.form.page:
            return "no pages"
        return None if row.batch == 1 and row.decodes else "one sequence, one query token"

    def forms(self, row):
        return [Form("bshd"), Form("bhsd")]

    def prepare(self, row, tensors):
        layout = "NHD" if tensors.form.kind == "bshd" else "HND"
        return Prepared(lambda i: self.library.single_decode_with_kv_cache(tensors.q[0], tensors.k[i][0], tensors.v[i][0], kv_layout=layout,
                                                                           sm_scale=row.scale))


class Xqa(FlashInfer):
    name, kernel, pages = "flashinfer-xqa", "xqa", (16, 64, 128)

    def refuses(self, row):
        return None if row.decodes else "one query token a sequence"

    def prepare(self, row, tensors):
        out, longest = tensors.output(), tensors.table.shape[1] * tensors.form.page
        return Prepared(lambda i: self.library.decode.xqa_batch_decode_with_kv_cache(
            tensors.q, (tensors.k[i], tensors.v[i]), self.workspace(), tensors.table, tensors.lens, longest, bmm1_scale=row.scale, bmm2_scale=1.0,
            out=out, kv_layout=tensors.form.kind.upper()))


class Prefill(FlashInfer):
    """Chunks and mixed batches on pages; of decode rows the decode kernels are the ones to ask."""

    name, kernel = "flashinfer-prefill", "prefill"

    def refuses(self, row):
        return "one query token a sequence: flashinfer-tc" if row.decodes else None

    def make_wrapper(self, layout):
        return self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace(), layout)

    def prepare(self, row, tensors):
        wrapper, out = self.wrapper(tensors.form), tensors.output()

        def plan():
            wrapper.plan(tensors.q_starts, tensors.page_starts, tensors.page_ids, tensors.last_page_lens, row.q_heads, row.kv_heads, row.head_dim,
                         tensors.form.page, causal=row.causal, sm_scale=row.scale, **self.types(tensors))

        return Prepared(lambda i: wrapper.run(tensors.q, (tensors.k[i], tensors.v[i]), out=out), plan)


PEERS = (CudaCores, TensorCores, Batch, Single, Xqa, Prefill)

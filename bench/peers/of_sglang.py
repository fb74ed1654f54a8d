"""SGLang's Triton decode kernels on a CUDA GPU, called on their own: its Work-Centric (Lean) Attention, which the server itself takes on AMD
GPUs alone, and the split kernel that it takes elsewhere. K and V are slots of one token, found by indices."""
import torch

from peers import Peer, Prepared
from peers.of_flash_attention import version_of
from peers.rows import Form

MOST_SPLITS, SPLIT_TOKENS = 16, 256  # the server's own numbers follow from its options; these are of its order


class SglangLean(Peer):
    name = "sglang-lean"

    def __init__(self, device, threads):
        from sglang.kernels.ops.attention import decode_attention

        self.module, self.impl = decode_attention, f"sglang-{version_of('sglang')}/lean"

    def refuses(self, row):
        if row.form.page not in (0, 1):
            return "called with slots of one token here"
        if row.head_dim > 128:
            return "d above 128"
        return None if row.decodes else "one query token a sequence"

    def forms(self, row):
        return [Form("nhd", row.form.page)] if row.form.page else [Form("thd")]

    def prepare(self, row, tensors):
        m, out = self.module, tensors.output()
        k, v = ([x.view(-1, row.kv_heads, row.head_dim) for x in caches] for caches in (tensors.k, tensors.v))
        slots = (tensors.page_ids if tensors.form.page else torch.arange(sum(row.lens), device=tensors.device)).to(torch.int64)
        programs, remap, xcds = m._lean_decode_launch_params(row.kv_heads, row.group)
        parts = [torch.zeros((programs, m._LEAN_BLOCK_M), dtype=torch.float32, device=tensors.device) for _ in "ml"]
        sums = torch.zeros((programs, m._LEAN_BLOCK_M, row.head_dim), dtype=torch.float32, device=tensors.device)
        locks = torch.zeros(programs, dtype=torch.int32, device=tensors.device)

        def call(i):
            m._decode_lean_attention_fwd(tensors.q, k[i], v[i], out, tensors.kv_starts, slots, programs, row.scale, 1.0, remap, xcds, *parts, sums,
                                         locks, page_size=1)
            return out

        return Prepared(call)


class SglangSplit(SglangLean):
    name = "sglang-triton"

    def __init__(self, device, threads):
        super().__init__(device, threads)
        self.impl = self.impl.replace("/lean", "/triton")

    def prepare(self, row, tensors):
        out = tensors.output()
        k, v = ([x.view(-1, row.kv_heads, row.head_dim) for x in caches] for caches in (tensors.k, tensors.v))
        slots = (tensors.page_ids if tensors.form.page else torch.arange(sum(row.lens), device=tensors.device)).to(torch.int64)
        logits = torch.empty((row.batch, row.q_heads, MOST_SPLITS, row.head_dim), dtype=torch.float32, device=tensors.device)
        lse = torch.empty((row.batch, row.q_heads, MOST_SPLITS), dtype=torch.float32, device=tensors.device)
        splits = torch.tensor([max(1, min(MOST_SPLITS, n // SPLIT_TOKENS)) for n in row.lens], dtype=torch.int32, device=tensors.device)

        def call(i):
            self.module.decode_attention_fwd(tensors.q, k[i], v[i], out, tensors.kv_starts, slots, logits, lse, splits, MOST_SPLITS, row.scale,
                                             1.0, 1.0, enable_lean=False)
            return out

        return Prepared(call)


PEERS = (SglangLean, SglangSplit)

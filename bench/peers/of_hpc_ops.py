"""Tencent's hpc-ops: decode in bf16 on pages that hold K and V of a block side by side."""
import torch

from peers import Peer, Prepared
from peers.of_flash_attention import version_of
from peers.rows import Form


class HpcOps(Peer):
    name = "hpc-ops"
    dtypes = ("bf16",)

    def __init__(self, device, threads):
        import hpc

        self.library, self.impl = hpc, f"hpc-ops-{version_of('hpc-ops', 'hpc')}/decode"

    def refuses(self, row):
        return None if row.decodes and row.head_dim == 128 else "one query token and d 128"

    def forms(self, row):
        return [Form("nhd", row.form.page)] if row.form.page else [Form("nhd", 32), Form("nhd", 64)]

    def prepare(self, row, tensors):
        """The cache is a copy of its own, with zeros behind a sequence's end. Lengths are those before this token."""
        out, before, caches = tensors.output(), tensors.lens - 1, []
        last = tensors.page_starts[1:].long() - 1
        for k, v in zip(tensors.k, tensors.v, strict=True):
            cache = torch.stack([k, v], dim=1)
            for page, used in zip(tensors.page_ids[last.to(tensors.device)].tolist(), tensors.last_page_lens.tolist(), strict=True):
                cache[page, :, used:] = 0
            caches.append(cache)
        return Prepared(lambda i: self.library.attention_decode_bf16(tensors.q, caches[i], tensors.table, before, out))


PEERS = (HpcOps,)

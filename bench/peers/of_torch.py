"""PyTorch's own: scaled_dot_product_attention by kernel, FlexAttention, and on a CPU the three ways to give it grouped heads.

Where lengths differ: padded to the longest (then it attends to the padding too, which is cheaper than a mask: a favour), a call for each
sequence, and for flash its operator of variable lengths.
"""
import torch

from peers import Peer, Prepared
from peers.rows import Form

VERSION = torch.__version__.partition("+")[0]
PADDED, EACH, VARLEN = "padded: attends to the padding", "a call for each sequence", "variable-length operator"
MOST_CALLS = 64  # of one row, where each sequence is a call


def contiguous_forms(row, varlen: bool = False) -> list:
    forms = [Form("bhsd"), Form("bshd")] if row.uniform else [Form("bhsd", how=PADDED), Form("bshd", how=PADDED)]
    forms = forms if row.even_queries and (row.decodes or row.uniform) else []
    if (not row.uniform or not row.even_queries) and row.batch <= MOST_CALLS:
        forms.append(Form("blocks", how=EACH))
    return forms + ([Form("thd", how=VARLEN)] if varlen and (not row.uniform or not row.even_queries or not row.decodes) else [])


def as_bhsd(x: torch.Tensor, form: Form) -> torch.Tensor:
    return x if form.kind == "bhsd" else x.transpose(1, 2)


class Sdpa(Peer):
    """One kernel of scaled_dot_product_attention, queries as they are."""

    backend: str
    kernel: str

    def __init__(self, device, threads):
        self.choice = getattr(torch.nn.attention.SDPBackend, self.backend)
        self.impl = f"torch-{VERSION}/{self.kernel}"

    def refuses(self, row):
        if row.form.page:
            return "no pages"
        if row.causal and not row.decodes and row.n_q != row.lens:
            return "its causal mask begins at the first key: not for a chunk in the middle"
        return None

    def forms(self, row):
        return contiguous_forms(row)

    def attend(self, q, k, v, row):
        """q [B, Hq, n_q, d], k and v [B, Hkv, n, d]."""
        with torch.nn.attention.sdpa_kernel(self.choice):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.causal and not row.decodes, scale=row.scale,
                                                                    enable_gqa=row.group > 1)

    def prepare(self, row, tensors):
        return Prepared(self.each(row, tensors) if tensors.form.how == EACH else self.whole(row, tensors))

    def whole(self, row, tensors):
        q = tensors.q_bshd.transpose(1, 2)
        return lambda i: self.attend(q, *(as_bhsd(x[i], tensors.form) for x in (tensors.k, tensors.v)), row).transpose(1, 2)

    def each(self, row, tensors):
        queries = [q.transpose(0, 1)[None] for q in tensors.q.split(row.n_q)]
        caches = [[tuple(tensors.sequence(x, b)[None] for x in (k, v)) for b in range(row.batch)] for k, v in zip(tensors.k, tensors.v)]

        def call(i):
            return [self.attend(q, *cache, row)[0].transpose(0, 1) for q, cache in zip(queries, caches[i], strict=True)]

        return call


class Cudnn(Sdpa):
    name, kernel, backend = "torch-cudnn", "cudnn", "CUDNN_ATTENTION"

    def __init__(self, device, threads):
        super().__init__(device, threads)
        self.impl = f"torch-{VERSION}/cudnn{torch.backends.cudnn.version()}"

    def prepare(self, row, tensors):
        prepared = super().prepare(row, tensors)
        prepared.first_call_plans = True  # it makes a plan at every new shape
        return prepared


class Flash(Sdpa):
    """FlashAttention-2 in PyTorch, by its operator: causality counts from the last key there."""

    name, kernel, backend = "torch-flash", "flash", "FLASH_ATTENTION"

    def refuses(self, row):
        return "no pages" if row.form.page else None

    def forms(self, row):
        return contiguous_forms(row, varlen=True)

    def attend(self, q, k, v, row):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.operator(row, q, k, v, None, None, q.shape[1], k.shape[1]).transpose(1, 2)

    def operator(self, row, q, k, v, q_starts, kv_starts, most_q, most_k):
        causal = row.causal and not row.decodes
        return torch.ops.aten._flash_attention_forward(q, k, v, q_starts, kv_starts, most_q, most_k, 0.0, causal, False, scale=row.scale)[0]

    def prepare(self, row, tensors):
        if tensors.form.how != VARLEN:
            return super().prepare(row, tensors)
        starts = tensors.q_starts, tensors.kv_starts
        return Prepared(lambda i: self.operator(row, tensors.q, tensors.k[i], tensors.v[i], *starts, max(row.n_q), row.longest))


class HeadsAsQueries(Sdpa):
    """Query heads that share K and V given as that many query tokens, so that K and V are read once; of calls without a causal mask."""

    def refuses(self, row):
        return super().refuses(row) or ("query heads stand in for tokens, which are causal here" if not row.decodes else None)

    def attend(self, q, k, v, row):
        rows = q.reshape(q.shape[0], row.kv_heads, row.group, row.head_dim)
        with torch.nn.attention.sdpa_kernel(self.choice):
            return torch.nn.functional.scaled_dot_product_attention(rows, k, v, scale=row.scale).reshape(q.shape)


class Efficient(HeadsAsQueries):
    name, kernel, backend, dtypes = "torch-efficient", "efficient", "EFFICIENT_ATTENTION", ("fp32", "fp16", "bf16")


class OnCpu(Sdpa):
    """Whatever kernel scaled_dot_product_attention takes on a CPU."""

    devices, dtypes = ("cpu",), ("fp32", "fp16", "bf16")

    def __init__(self, device, threads):
        torch.set_num_threads(threads)
        self.impl = f"torch-{VERSION}/{self.kernel}"

    def forms(self, row):
        """Padding costs a CPU more than a call for each sequence."""
        return [form for form in contiguous_forms(row) if not form.padded]


class Expanded(OnCpu):
    """K and V copied to all query heads beforehand: the copy is not timed."""

    name, kernel = "torch-expanded", "expanded"

    def prepare(self, row, tensors):
        """As many copies as 4 GB hold, one at least."""
        self.copies = max(1, min(tensors.copies, (4 << 30) // (row.group * row.kv_bytes)))
        return super().prepare(row, tensors)

    def whole(self, row, tensors):
        q, dim = tensors.q_bshd.transpose(1, 2), {"bhsd": 1, "bshd": 2}[tensors.form.kind]
        caches = [tuple(as_bhsd(x[i].repeat_interleave(row.group, dim), tensors.form) for x in (tensors.k, tensors.v)) for i in range(self.copies)]
        copies = self.copies
        return lambda i: self.plain(q, *caches[i % copies], row).transpose(1, 2)

    def each(self, row, tensors):
        queries = [q.transpose(0, 1)[None] for q in tensors.q.split(row.n_q)]
        caches = [[tuple(tensors.sequence(x[i], b).repeat_interleave(row.group, 0)[None] for x in (tensors.k, tensors.v)) for b in range(row.batch)]
                  for i in range(self.copies)]
        copies = self.copies

        def call(i):
            return [self.plain(q, *cache, row)[0].transpose(0, 1) for q, cache in zip(queries, caches[i % copies], strict=True)]

        return call

    def plain(self, q, k, v, row):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.causal and not row.decodes, scale=row.scale)


class EnableGqa(OnCpu):
    name, kernel = "torch-enable_gqa", "enable_gqa"

    def refuses(self, row):
        return super().refuses(row) or ("as many K/V heads as query heads: the same call as torch-expanded" if row.group == 1 else None)

    def attend(self, q, k, v, row):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.causal and not row.decodes, scale=row.scale,
                                                                enable_gqa=True)


class CpuHeadsAsQueries(OnCpu, HeadsAsQueries):
    name, kernel = "torch-heads_as_queries", "heads_as_queries"

    def refuses(self, row):
        return HeadsAsQueries.refuses(self, row) or ("as many K/V heads as query heads: the same call as torch-expanded" if row.group == 1 else None)

    def attend(self, q, k, v, row):
        rows = q.reshape(q.shape[0], row.kv_heads, row.group, row.head_dim)
        return torch.nn.functional.scaled_dot_product_attention(rows, k, v, scale=row.scale).reshape(q.shape)


class Masked(Expanded):
    """Rules of scores as a mask, of the queries' type where it adds numbers; K and V copied to all query heads beforehand. Of rows that have
    rules, and of a chunk's causality, which it has as a mask too."""

    name, kernel, backend = "torch-masked", "masked", None
    features = ("window", "alibi", "mask", "tree")

    def __init__(self, device, threads):
        if device == "cpu":
            torch.set_num_threads(threads)
        self.choice = self.backend and getattr(torch.nn.attention.SDPBackend, self.backend)
        self.impl = f"torch-{VERSION}/{self.kernel}"

    def refuses(self, row):
        if row.form.page:
            return "no pages"
        return None if row.uniform and (row.features or not row.decodes) else "nothing to mask"

    def forms(self, row):
        return [Form("bhsd")]

    def whole(self, row, tensors):
        bias = torch.stack([tensors.bias(b) for b in range(row.batch)])
        self.bias = bias if bias.dtype == torch.bool else bias.to(tensors.dtype)
        return super().whole(row, tensors)

    def plain(self, q, k, v, row):
        mask = self.bias.expand(-1, q.shape[1], -1, -1)
        if self.choice is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=row.scale)
        with torch.nn.attention.sdpa_kernel(self.choice):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=row.scale)


class MaskedCudnn(Masked):
    name, kernel, backend, devices, dtypes = "torch-masked-cudnn", "masked-cudnn", "CUDNN_ATTENTION", ("cuda",), ("fp16", "bf16")


class MaskedEfficient(Masked):
    name, kernel, backend, devices = "torch-masked-efficient", "masked-efficient", "EFFICIENT_ATTENTION", ("cuda",)


class Flex(Peer):
    """FlexAttention, compiled for each row; lengths and causality by a block mask, which is its plan."""

    name = "torch-flex"
    devices = ("cuda", "cpu")
    dtypes = ("fp32", "fp16", "bf16")

    def __init__(self, device, threads):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.device, self.create_block_mask, self.flex_attention = device, create_block_mask, flex_attention
        self.impl = f"torch-{VERSION}/flex"

    def refuses(self, row):
        if row.form.page:
            return "pages need a conversion of its own"
        return None if row.even_queries else "query tokens differ"

    def forms(self, row):
        return [Form("bhsd", how="" if row.uniform else "rows of the longest, masked"), *([Form("bshd")] if row.uniform else [])]

    def prepare(self, row, tensors):
        torch._dynamo.reset()
        attend, lens, n_q, made = torch.compile(self.flex_attention, dynamic=False), tensors.lens, row.n_q[0], {}

        def mask(b, _, i, j):
            seen = j < lens[b]
            return seen & (j <= lens[b] - n_q + i) if row.causal else seen

        def plan():
            made["mask"] = self.create_block_mask(mask, row.batch, None, n_q, row.longest, device=self.device)

        needs_mask = not row.uniform or row.causal and not row.decodes
        q = tensors.q_bshd.transpose(1, 2)
        if needs_mask:
            plan()

        def call(i):
            k, v = (as_bhsd(x[i], tensors.form) for x in (tensors.k, tensors.v))
            return attend(q, k, v, block_mask=made.get("mask"), scale=row.scale, enable_gqa=row.group > 1).transpose(1, 2)

        return Prepared(call, plan if needs_mask else None)


PEERS = (Flash, Cudnn, Efficient, Flex, Expanded, EnableGqa, CpuHeadsAsQueries, Masked, MaskedCudnn, MaskedEfficient)

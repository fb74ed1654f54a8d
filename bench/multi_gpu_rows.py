"""The rows of bench/multi_gpu.py: Llama shapes and the paper's figure of eight GPUs, in the order of what they decide."""
import dataclasses

AIMS = ("1 x 128k", "1 x 32k", "1 x 8k", "8 ragged to 8k", "8 x 8k", "32 x 8k")  # of either Llama shape, what the aims are about


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    lens: tuple

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * sum(self.lens) * self.kv_heads * self.head_dim


def rows() -> list:
    """The paper's figure of eight GPUs (section "Multi-GPU Execution"), then Llama shapes, in the order of their importance."""
    kilo = 1024
    found = []
    for model, q_heads in (("llama-8b", 32), ("llama-70b", 64)):
        for batch in (1, 8, 32):
            found += [Row(f"{model} {batch} x {n}k", q_heads, 8, 128, (n * kilo,) * batch) for n in (8, 32, 128, 512, 1024)]
        for n in (8, 128):  # from an eighth of the longest up, evenly
            found.append(Row(f"{model} 8 ragged to {n}k", q_heads, 8, 128, tuple(n * kilo * (i + 1) // 8 for i in range(8))))
    for n in (1, 4, 16, 64, 256, 1024):
        found.append(Row(f"paper 8a 256 heads 4 x {n}k", 256, 256, 64, (n * kilo,) * 4))
    found += [Row(f"paper 8b {heads} heads 4 x 256k", heads, heads, 64, (256 * kilo,) * 4) for heads in (64, 160, 320, 512)]
    found += [Row(f"paper 8c 256 heads {batch} x 256k", 256, 256, 64, (256 * kilo,) * batch) for batch in (1, 8, 32)]
    aims = [row for size in AIMS for row in found if row.name.startswith("llama") and row.name.endswith(f"b {size}")]
    return aims + sorted((row for row in found if row not in aims), key=lambda row: (row.name.startswith("paper"), row.kv_bytes))


def quick_rows() -> list:
    return [Row("quick 8 heads 3 ragged", 8, 4, 64, (100, 1, 300)), Row("quick 8 heads 2 x 1k", 8, 2, 64, (1024, 1024))]

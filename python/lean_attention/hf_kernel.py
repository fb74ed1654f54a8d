"""python -m lean_attention.hf_kernel FOLDER: a kernel for Hugging Face's package `kernels`, which Transformers loads by a name.

FOLDER/build has a variant of each kind of device. A variant holds no binary: its functions are flash-attention's, from the
installed package, which links no torch; so it serves every release of torch, CUDA and Python that the package does.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Optional, Sequence

import lean_attention

NAME = "lean-attention"
REPOSITORY = "lean/flash-attn2"  # Transformers knows by "flash" in it how masks, static caches and generate_batch() are to be
DEVICES = ("cpu", "cuda")  # of PyTorch: a build of torch for CUDA takes "cuda", whatever the tensors are on
SOURCE = '''\
"""Attention for the decode phase of transformers, with flash-attention's functions; written by lean_attention.hf_kernel."""

try:
    from lean_attention.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
except ModuleNotFoundError as error:
    if error.name != "lean_attention":
        raise
    raise ModuleNotFoundError(
        "lean_attention: this kernel is a door to that package, which is not installed: pip install lean-attention", name=error.name
    ) from None

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''


def write(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the variants below ``folder/build`` and returns their folders; files of an earlier run are replaced."""
    variants = []
    for device in DEVICES:
        variant = folder / "build" / f"torch-{device}"
        variant.mkdir(parents=True, exist_ok=True)
        (variant / "__init__.py").write_text(SOURCE)
        (variant / "metadata.json").write_text(json.dumps(metadata(device), indent=2) + "\n")
        variants.append(variant)
    return variants


def metadata(device: str) -> dict:
    """What `kernels` 0.17 wants to know of a variant; `id` is the name that it imports the variant by."""
    return {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{device}_{lean_attention.__version__.replace('.', '_')}",
        "version": 1,  # of the three functions, whose names and arguments are flash-attention's
        "license": "Apache-2.0",
        "python-depends": [],  # may name few packages, and not this one
        "backend": {"type": device},
    }


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lean_attention.hf_kernel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).folder.absolute()
    try:
        variants = write(folder)
    except OSError as error:
        parser.error(f"FOLDER: {error}")
    print(*variants, sep="\n")
    print(f'LOCAL_KERNELS={REPOSITORY}={folder}  # then attn_implementation="{REPOSITORY}"')
    return 0


if __name__ == "__main__":
    sys.exit(main())

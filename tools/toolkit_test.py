#!/usr/bin/env python3
"""Checks that `tools/setup.sh nvcc` gives a machine without a CUDA toolkit one that this project builds with.

A copy of the tree in build-toolkit/ fetches the toolkit, configures the preset cuda and builds a program that is linked to
the run time. Where this machine has toolkits, in a mount namespace that hides them (that takes root, or user namespaces).
Ends with "N passed, M failed".

Usage: toolkit_test.py
"""
import os
import pathlib
import shutil
import subprocess
import sys

import mutants  # beside this file

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ROOT / "build-toolkit" / "tree"
COPIED = [*mutants.COPIED, "python"]
HIDDEN_VARIABLES = ("CUDACXX", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")


def copy_tree() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    for name in COPIED:
        source, target = ROOT / name, TREE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy2(source, target)


def compilers() -> list[str]:
    """Every nvcc on the PATH."""
    folders = dict.fromkeys(os.environ["PATH"].split(":"))
    return [path for folder in folders if os.access(path := os.path.join(folder, "nvcc"), os.X_OK)]


def toolkits() -> list[str]:
    """Folders of toolkits, each once."""
    found = [*pathlib.Path("/usr/local").glob("cuda*"), *pathlib.Path("/usr/lib").glob("cuda"), pathlib.Path("/opt/cuda")]
    found += [pathlib.Path(compiler).resolve().parents[1] for compiler in compilers()]
    folders = {str(folder.resolve()) for folder in found if folder.is_dir()}
    return sorted(folders - {"/", "/usr", "/usr/local"})


def hidden(*command: str, stderr: int | None = None) -> subprocess.CompletedProcess:
    """Runs a command in the copy, where no toolkit of this machine is to be seen."""
    hide = [f"mount -t tmpfs none {folder}" for folder in toolkits()]
    hide += [f"test ! -e {path} || mount --bind /dev/null {path}" for path in compilers()]
    apart = []
    if hide:
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        apart = ["unshare", "--mount", *as_root, "bash", "-c", " && ".join([*hide, 'exec "$@"']), "bash"]
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
    return subprocess.run([*apart, *command], cwd=TREE, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr, check=False)


def fetched_nvcc() -> str:
    done = hidden("tools/setup.sh", "nvcc")
    if done.returncode != 0:
        raise RuntimeError(f"tools/setup.sh nvcc ended with {done.returncode}")
    nvcc = done.stdout.strip()
    if not nvcc.startswith(f"{TREE}/.venv-cuda/"):
        raise RuntimeError(f"tools/setup.sh nvcc found {nvcc!r}, which was to be hidden")
    return nvcc


def build_and_run(nvcc: str) -> None:
    for command in (["cmake", "--preset", "cuda", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DLEAN_CUDA_ARCHITECTURES=80-real;90"],
                    ["cmake", "--build", "--preset", "cuda", "--target", "cuda_toolkit"]):
        done = hidden(*command, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise RuntimeError(f"{done.stdout}\nfailed: {' '.join(command)}")
    version = hidden("build-cuda/bin/cuda_toolkit").stdout.strip()
    print(f"{nvcc}: run time {version}")
    if not version.startswith("130"):
        raise RuntimeError(f"the program is linked to a run time that is not the fetched one: {version}")


def main() -> int:
    try:
        copy_tree()
        build_and_run(fetched_nvcc())
    except (OSError, RuntimeError) as error:
        print(f"{error}\n0 passed, 1 failed")
        return 1
    shutil.rmtree(TREE.parent)  # a toolkit is 300 MB; kept when something failed, to be looked at
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

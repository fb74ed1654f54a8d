#!/usr/bin/env python3
"""Builds llama.cpp's ggml for this CPU from the source package of llama-cpp-python on PyPI, into build-ggml, for bench/suite.py.

    python3 bench/peers/build_ggml.py [--sdist FILE.tar.gz] [--jobs N]

Needs cmake, a C++ compiler, pip with the network (77 MB, or the package as a file), and a minute of a core.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "llama-cpp-python"
# As a project of its own ggml also writes a pkg-config file, whose template the source package lacks.
PROJECT = "cmake_minimum_required(VERSION 3.18)\nproject(ggml_as_part C CXX ASM)\nadd_subdirectory(ggml)\n"


def download(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", folder, PACKAGE]
    subprocess.run(command, check=True)
    return sorted(folder.glob("llama_cpp_python-*.tar.gz"))[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=pathlib.Path, help="the source package, where it is there already")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build-ggml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    source = options.out / "source"
    source.mkdir(parents=True, exist_ok=True)
    sdist = options.sdist or download(options.out)
    with tarfile.open(sdist) as archive:
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            if parts[1:4] == ("vendor", "llama.cpp", "ggml") and ".." not in parts and (member.isfile() or member.isdir()):
                member.name = "/".join(parts[3:])
                archive.extract(member, source)
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF"]
    build = options.out / "build"
    (source / "CMakeLists.txt").write_text(PROJECT)
    subprocess.run(["cmake", "-S", source, "-B", build, *flags], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "ggml-cpu", "-j", str(options.jobs)], check=True)
    (options.out / "version").write_text(re.search(r"-([0-9.]+)\.tar", sdist.name)[1] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# Installs what is missing on Debian 12 or Ubuntu 24.04 and newer, and nothing else. Quick when nothing is missing.
# Usage: tools/setup.sh build     what building and running need
#        tools/setup.sh format    a Python environment in .venv with the pinned clang-format
#        tools/setup.sh python    a Python environment in .venv-python with what the Python tests run with, pinned; over it
#                                 .venv-python-oldest and -newest, with other releases of what the package works with, and
#                                 -kernels, with Hugging Face's `kernels` and a release of Transformers that takes it
#        tools/setup.sh engines   over .venv-python a .venv-vllm with vLLM for the CPU, and over both a .venv-sglang with SGLang,
#                                 pinned, each with what its tests need
#        tools/setup.sh docs      a Python environment in .venv-docs with what the site of docs/ is built with, pinned
#        tools/setup.sh check     build and format, clang with its sanitizers and what else `make test` builds with; it calls python,
#                                 engines and docs itself, beside the builds
#        tools/setup.sh nvcc      the CUDA compiler: prints the path of the one that is there, or of one installed into .venv-cuda
set -euo pipefail
cd "$(dirname "$0")/.."

build_packages=(g++ cmake ninja-build pkg-config python3 libhwy-dev libgtest-dev libbenchmark-dev libcli11-dev
  nlohmann-json3-dev libfmt-dev)
check_packages=(ccache clang llvm nodejs)
format_packages=(python3 python3-venv)
python_packages=(python3 python3-venv python3-dev)
python_requirements=tests/python/requirements.txt
vllm_requirements=tests/python/requirements-vllm.txt
sglang_packages=(sglang==0.5.23 orjson==3.13.0 xxhash==4.1.0 zstandard==0.25.0)
docs_requirements=docs/requirements.txt
clang_format_version=19.1.7
oldest_nvcc=12.8
nvcc_packages=({nvidia-cuda-nvcc,nvidia-cuda-crt,nvidia-nvvm,nvidia-cuda-runtime,nvidia-cuda-cccl}'==13.0.*')

say() { echo "setup: $*"; }

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    say "needs root to run: $*"
    return 1
  fi
}

# Installs those of the given Debian packages that are missing.
need_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "no dpkg here; the build expects what these Debian packages hold: $*"
    return 0
  fi
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  say "apt-get install ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends "${missing[@]}" >/dev/null
}

# Its package has clang's major version in its name.
need_sanitizer_runtime() {
  local major
  major=$(clang -dumpversion | cut -d. -f1)
  need_packages "libclang-rt-${major}-dev"
}

need_clang_format() {
  local tool=.venv/bin/clang-format
  if [[ -x $tool ]] && "$tool" --version | grep -qF " $clang_format_version"; then
    return 0
  fi
  need_packages "${format_packages[@]}"
  say "clang-format $clang_format_version into .venv"
  python3 -m venv .venv
  .venv/bin/pip install --quiet --no-compile --disable-pip-version-check "clang-format==$clang_format_version"
}

# Whether this is an nvcc that the build takes (CMakeLists.txt: CUDA 12.8 or newer); Debian 12's own is older.
is_new_enough() {
  [[ -x $1 ]] || return 1
  local release
  release=$("$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  if [[ -n $release && $(printf '%s\n' "$oldest_nvcc" "$release" | sort -V | head -n 1) == "$oldest_nvcc" ]]; then
    return 0
  fi
  say "$1 is CUDA ${release:-of an unknown version}; $oldest_nvcc or newer is needed" >&2
  return 1
}

# The compiler, its headers and the run time are PyPI packages, which hold less than a toolkit does: nvcc.profile expects
# lib64, CMake's FindCUDAToolkit a libcudart.so without a version. An older run may have left them out, so they are made each time.
need_nvcc() {
  local found folder=.venv-cuda
  for found in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if is_new_enough "$found"; then
      echo "$found"
      return 0
    fi
  done
  if ! cmp -s <(printf '%s\n' "${nvcc_packages[@]}") "$folder/packages.txt"; then
    need_packages python3 python3-venv >&2
    say "${nvcc_packages[0]} and what it needs into $folder" >&2
    rm -rf "$folder"
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check "${nvcc_packages[@]}" >&2
    printf '%s\n' "${nvcc_packages[@]}" >"$folder/packages.txt"
  fi
  local toolkit=("$PWD/$folder"/lib/python3*/site-packages/nvidia/cu13)
  ln -sfn lib "${toolkit[0]}/lib64"
  ln -sfn libcudart.so.13 "${toolkit[0]}/lib/libcudart.so"
  echo "${toolkit[0]}/bin/nvcc"
}

# Kept apart from the environment, which may be made anew. Without a Debian mirror the operators for ONNX Runtime are left out.
need_onnxruntime_header() {
  tools/onnxruntime_headers.sh .venv-onnxruntime || say "the Python package is built without its operators for ONNX Runtime"
}

# An environment with what a file of requirements names. Made anew when that has changed since.
need_environment() {
  local folder=$1 requirements=$2
  if cmp -s "$requirements" "$folder/requirements.txt"; then
    return 0
  fi
  say "$requirements into $folder"
  rm -rf "$folder"
  python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check --requirement "$requirements"
  cp "$requirements" "$folder/requirements.txt"
}

need_python() {
  need_packages "${python_packages[@]}"
  need_onnxruntime_header
  need_environment .venv-python "$python_requirements"
}

need_docs() {
  need_packages "${format_packages[@]}"
  need_environment .venv-docs "$docs_requirements"
}

# An environment that sees what .venv-python has beneath what it has.
make_environment_over_pinned() {
  rm -rf "$1"
  python3 -m venv "$1"
  (cd .venv-python/lib/python3*/site-packages && pwd) >"$(echo "$1"/lib/python3*/site-packages)/zz_pinned.pth"
}

# Such an environment with packages of its own. Made anew when either have changed since.
need_python_over() {
  local folder=$1
  shift
  if ! cmp -s <(cat "$python_requirements" <(printf '%s\n' "$@")) "$folder/requirements.txt"; then
    make_environment_over_pinned "$folder"
    [[ $# == 0 ]] || "$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check "$@"
    cat "$python_requirements" <(printf '%s\n' "$@") >"$folder/requirements.txt"
  fi
}

# The oldest releases that pyproject.toml allows, and the newest that pip finds, which is asked each time; without a network
# these stay as they are. Transformers takes few releases of `kernels`, so the two of a pair are named.
need_python_releases() {
  local oldest
  mapfile -t oldest < <(grep -oE '(transformers|jax|onnxruntime)>=[0-9.]+' pyproject.toml | sort -u | sed 's/>=/==/')
  need_python_over .venv-python-oldest "${oldest[@]}"
  need_python_over .venv-python-kernels transformers==5.22.2 kernels==0.17.2
  need_python_over .venv-python-newest
  local packages=(transformers jax kernels onnxruntime)
  if newest_torch_is_small; then packages+=(torch); fi
  .venv-python-newest/bin/pip install --quiet --no-compile --disable-pip-version-check --upgrade "${packages[@]}" ||
    say "the newest ${packages[*]}: not to be had"
}

# Without what its package asks for and its tests do not need: builds of torch and its companions, triton (a gigabyte), and more.
need_vllm() {
  local folder=.venv-vllm
  if cmp -s <(cat "$python_requirements" "$vllm_requirements") "$folder/requirements.txt"; then
    return 0
  fi
  say "$vllm_requirements into $folder"
  make_environment_over_pinned "$folder"
  "$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check --no-deps --requirement "$vllm_requirements"
  cat "$python_requirements" "$vllm_requirements" >"$folder/requirements.txt"
}

# SGLang asks for gigabytes of packages for GPUs; its CPU engine starts with what vLLM's tests have and stand-ins for the rest
# (tests/python/sglang_stubs).
need_sglang() {
  local folder=.venv-sglang below=(.venv-vllm/lib/python3*/site-packages .venv-python/lib/python3*/site-packages)
  if cmp -s <(cat .venv-vllm/requirements.txt <(printf '%s\n' "${sglang_packages[@]}")) "$folder/requirements.txt"; then
    return 0
  fi
  say "${sglang_packages[0]} into $folder"
  rm -rf "$folder"
  python3 -m venv "$folder"
  printf '%s\n' "${below[@]/#/$PWD/}" >"$(echo "$folder"/lib/python3*/site-packages)/zz_below.pth"
  "$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check --no-deps "${sglang_packages[@]}"
  cat .venv-vllm/requirements.txt <(printf '%s\n' "${sglang_packages[@]}") >"$folder/requirements.txt"
}

# A build for CUDA needs gigabytes of packages; one for the CPU comes where pip is pointed at PyTorch's index of these.
newest_torch_is_small() {
  .venv-python-newest/bin/pip install --quiet --no-compile --disable-pip-version-check --dry-run --no-deps --upgrade --report - torch |
    python3 -c 'if True:
      import json, sys
      for torch in (each["metadata"] for each in json.load(sys.stdin)["install"]):
          large = any(need.startswith(("nvidia-", "cuda-")) for need in torch["requires_dist"])
          print("setup: torch", torch["version"], "is the newest:", "a build for CUDA, so the pinned one stays" if large else "taken")
          sys.exit(large)
      sys.exit(1)'
}

case ${1:-} in
  build) need_packages "${build_packages[@]}" ;;
  format) need_clang_format ;;
  docs) need_docs ;;
  nvcc) need_nvcc ;;
  python)
    need_packages "${build_packages[@]}"
    need_python
    need_python_releases
    ;;
  engines)
    need_packages "${build_packages[@]}"
    need_python
    need_vllm
    need_sglang
    ;;
  check)
    need_packages "${build_packages[@]}" "${check_packages[@]}" "${python_packages[@]}"
    need_sanitizer_runtime
    need_clang_format
    ;;
  *)
    echo "usage: tools/setup.sh build|format|python|engines|docs|check|nvcc" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# make demo: builds the command and runs its main job, on the GPU where nvidia-smi finds one, else on the CPU. The GPU build has the
# kernels of the demo only (preset cuda-demo); where it fails, the CPU does the job.
set -euo pipefail
cd "$(dirname "$0")/.."

build() {  # preset, then options for cmake
  cmake --preset "$@" && cmake --build --preset "$1" --target lean_cli
}

build_for_gpu() {
  nvidia-smi -L >/dev/null 2>&1 || return 1
  local nvcc
  if nvcc=$(tools/setup.sh nvcc) && build cuda-demo "-DCMAKE_CUDA_COMPILER=$nvcc"; then return 0; fi
  echo "demo: there is a GPU, but the build for it failed (see above); on with the CPU"
  return 1
}

tools/setup.sh build
if build_for_gpu; then
  build-cuda-demo/bin/lean demo
else
  build cpu
  build/bin/lean demo
fi

#!/usr/bin/env bash
# make demo: builds the command and runs its main job, on the GPU where nvidia-smi finds one, else on the CPU. The GPU build has the
# kernels of the demo only (preset cuda-demo); where it fails, the CPU does the job.
set -euo pipefail
cd "$(dirname "$0")/.."

build() {  # preset, then options for cmake
  cmake --preset "$@" && cmake --build --preset "$1" --target lean_cli
}

build_for_gpu() {
  local nvcc
  if nvcc=$(tools/setup.sh nvcc) && build cuda-demo "-DCMAKE_CUDA_COMPILER=$nvcc"; then return 0; fi
  echo "demo: there is a GPU, but the build for it failed (see above); on with the CPU"
  return 1
}

# How long it takes: the build for the CPU is 3.5 minutes of one core's time, 5.5 beside other programs. Later builds do what changed.
announce() {  # folder, how long its first build takes
  if [[ -x $1/bin/lean ]]; then
    echo "demo: brings $1/bin/lean up to date, then runs it: less than a minute"
  else
    echo "demo: builds $1/bin/lean, the first time $2, then runs it: less than a minute"
  fi
}

if nvidia-smi -L >/dev/null 2>&1; then
  announce build-cuda-demo "some minutes more than the two to five that 2 cores take for the CPU"
  tools/setup.sh build
  if build_for_gpu; then exec build-cuda-demo/bin/lean demo; fi
fi
announce build "two to five minutes on 2 cores"
tools/setup.sh build
build cpu
exec build/bin/lean demo

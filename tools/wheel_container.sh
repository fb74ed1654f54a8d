#!/usr/bin/env bash
# Prepares cibuildwheel's container (pyproject.toml): Highway, which its system does not have, ONNX Runtime's C header, and nvcc if
# LEAN_CUDA is not OFF.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=/opt/python/cp312-cp312/bin:$PATH

highway=$(mktemp -d)
git clone --quiet --depth 1 --branch 1.2.0 https://github.com/google/highway "$highway"
cmake -S "$highway" -B "$highway/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF \
  -DHWY_ENABLE_CONTRIB=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON
cmake --build "$highway/build" --parallel
cmake --install "$highway/build"

tools/onnxruntime_headers.sh /opt/onnxruntime

if [[ ${LEAN_CUDA:-AUTO} != OFF ]]; then
  nvcc=$(tools/setup.sh nvcc | tail -n 1)
  printf '#!/bin/sh\nexec %s "$@"\n' "$nvcc" >/opt/lean-nvcc  # no link: nvcc finds its toolkit from where it was called
  chmod +x /opt/lean-nvcc
fi

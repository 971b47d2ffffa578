# make demo | make test set everything up by themselves; nothing outside this directory is touched.
# Needs CPython 3.10 or newer with the venv module, and (the first time) a package index that pip can reach.
#
#   PYTHON=python3.12 make test        use another interpreter
#   PIP_EXTRA_INDEX_URL=... make demo  where the default index has only CUDA builds of torch: PyTorch's CPU index
#   PYTEST_ARGS="-k manifest" make test

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

# The CPU build of vLLM exists for these.
WITH_VLLM ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),yes,no)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := $(VENV)-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
SOURCES := bytecheckpoint planners storage_backends tests examples benchmarks

# Small tensors on few cores: more threads only fight each other.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-vllm lint format bench clean

help:
	@echo "make demo   train, kill a rank in the middle of a save, resume on other layouts (about two minutes)"
	@echo "make test   linters, type checker, layers and every test"
	@echo "make test-vllm  only the tests with a real vLLM, in an environment of its own (a part of make test on Linux"
	@echo "            x86-64; WITH_VLLM=no leaves it out)"
	@echo "make lint   linters, type checker and layers only"
	@echo "make format rewrite the code as the formatter wants it"
	@echo "make bench  every benchmark against the floors and the peers, and docs/performance.md (about half an hour;"
	@echo "            BENCH_ARGS='--peers all' for more peers, BENCH_ARGS='--scale 0.01 --rounds 1' to see that it runs)"
	@echo "make clean  remove what the other targets made"

$(STAMP): pyproject.toml setup.cfg constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' found; set PYTHON to a CPython 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) or sys.implementation.name != "cpython")' \
	  || { echo "make: needs CPython 3.10 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); set PYTHON" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make: '$(PYTHON)' cannot make virtual environments; install your system's python3-venv package" >&2; exit 1; }
	@echo "make: installing into $(VENV) (once; the first time takes a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
ifeq ($(WITH_VLLM),yes)
	$(MAKE) --no-print-directory test-vllm
endif

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/inference tests/push -m vllm -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

$(VLLM_STAMP): pyproject.toml setup.cfg requirements-vllm.txt
	@echo "make: installing vLLM into $(VLLM_VENV) (once; some 3.5 GB and a few minutes; WITH_VLLM=no goes without) ..."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run --report $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

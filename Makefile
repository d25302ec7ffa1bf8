# `make` lists the targets. Each makes the environment that it needs first, in .venv, from
# pyproject.toml and constraints.txt; a second call finds the stamp there and goes on at once.
#
#     make setup PYTHON=python3.12    another interpreter than python3
#     make setup PIP=-v               see what pip does
#
# pip is configured as usual (environment, pip.conf). On Linux without a GPU, PyTorch's own index of
# CPU builds (pytorch.org, "Start locally") in PIP_EXTRA_INDEX_URL saves some 3 GB of CUDA packages.

PYTHON ?= python3
PIP := -qq
VENV := .venv
BIN := $(VENV)/bin
# Stamps, each touched when its step has succeeded: the environment itself, what training needs, the
# tools for tests and checks. Each depends on the one before: `make -j` never runs two pips at once.
CREATED := $(VENV)/.stamp-created
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test faults check check-format check-lint check-types check-imports format bench-gpu tensorboard clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## Make the environment, with the tools for tests and checks
	@echo "Ready: $(VENV). Everything that needs it finds it there; by hand: . $(BIN)/activate"

train: $(BASE) ## Train on Shakespeare's plays: configs/quickstart.yaml
	$(BIN)/gpt-lightning fit --config configs/quickstart.yaml

# A process for each core, up to four, and each with one thread (tests/conftest.py): the models are
# tiny, and two threads wait for each other whenever another process has a core.
test: $(DEV) ## Run the test suite
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

faults: $(DEV) ## Hurt real runs and print what came of it, case by case: some ten minutes
	$(BIN)/python -m pytest tests/faults -m "" --numprocesses auto --maxprocesses 2

check: check-format check-lint check-types check-imports ## Check format, lint, types and imports

check-format: $(DEV)
	$(BIN)/ruff format --check .

check-lint: $(DEV)
	$(BIN)/ruff check .

check-types: $(DEV)
	$(BIN)/mypy

check-imports: $(DEV)
	$(BIN)/lint-imports

format: $(DEV) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench-gpu: $(DEV) ## Measure all four GPT-2s on this GPU: benchmarks/gpu_CHIP.md; about an hour
	$(BIN)/gpt-lightning bench gpu

tensorboard: $(BASE) ## Look at the runs in lightning_logs/
	$(BIN)/tensorboard --logdir lightning_logs

clean: ## Remove the environment, caches and build results; runs and data stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find gpt_lightning tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One clear line for what a fresh machine may lack. If the interpreter behind .venv is gone, the
# stamp counts for nothing, and --clear starts afresh.
ifeq ($(shell test -x $(BIN)/python || echo gone),gone)
.PHONY: $(CREATED)
endif

$(CREATED):
	@$(PYTHON) -c '' 2>/dev/null || { \
	  echo "No Python at '$(PYTHON)': install 3.11 or newer, or name one: make PYTHON=python3.12 ..."; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "'$(PYTHON)' is $$($(PYTHON) -V 2>&1), but 3.11 is needed: make PYTHON=python3.12 ..."; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks the venv module; on Debian and Ubuntu: sudo apt install python3-venv"; \
	  exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V 2>&1) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# An interrupted or failed pip leaves no stamp, and the next call goes on from there.
PIP_INSTALL = $(BIN)/python -m pip install $(PIP) --disable-pip-version-check -c constraints.txt
PIP_FAILED = { \
  echo "pip failed. 'make PIP=-v $(MAKECMDGOALS)' shows more; 'make clean' starts afresh."; exit 1; }

$(BASE): pyproject.toml constraints.txt $(CREATED)
	@echo "Installing gpt_lightning and PyTorch in $(VENV): half a minute to ten, by the connection ..."
	@$(PIP_INSTALL) -e . || $(PIP_FAILED)
	@touch $@

# Only the list in the `dev` extra: `-e '.[dev]'` would take gpt_lightning out and in again, under a
# training that may be running.
$(DEV): $(BASE)
	@echo "Installing the tools for tests and checks: a few seconds to a minute ..."
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/dev.txt
	@$(PIP_INSTALL) -r $(VENV)/dev.txt || $(PIP_FAILED)
	@touch $@

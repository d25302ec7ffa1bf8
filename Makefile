# `make` lists the targets. Each target first creates the environment that it needs in .venv, from
# pyproject.toml and constraints.txt. A stamp file records that, so a second call starts at once.
#
#     make setup PYTHON=python3.12    use another interpreter than python3
#     make setup PIP=-v               show what pip does
#
# pip reads its usual configuration (environment, pip.conf). On Linux without a GPU, setting
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds (pytorch.org, "Start locally") saves a
# download of about 3 GB of CUDA packages.

PYTHON ?= python3
PIP := -qq
VENV := .venv
BIN := $(VENV)/bin
# Stamps, each touched when its step has succeeded: the environment, the packages for training, the
# tools for tests and checks. Each depends on the previous one, so `make -j` never runs pip twice at
# once.
CREATED := $(VENV)/.stamp-created
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-experiments test-slow test-long test-gpu stubs versions pages course-page docs format bench-gpu cpu-losses tensorboard clean \
  check check-format check-lint check-types check-imports check-spelling

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## Create the environment, with the tools for tests and checks
	@echo "Ready: $(VENV). To use it in this shell: . $(BIN)/activate"

train: $(BASE) ## Train on Shakespeare's plays (configs/quickstart.yaml)
	$(BIN)/gpt-lightning fit --config configs/quickstart.yaml

# One process for each core, up to four, each with one thread (tests/conftest.py). The models are
# tiny, and two threads wait for each other whenever another process occupies a core.
test: $(DEV) ## Run the test suite of the package
	$(BIN)/python -m pytest --ignore=tests/experiments --numprocesses auto --maxprocesses 4

test-experiments: $(DEV) ## Run the tests of experiments/
	$(BIN)/python -m pytest tests/experiments --numprocesses auto --maxprocesses 4

test-slow: $(DEV) ## Run the tests that the suite leaves out because they are slow (minutes)
	$(BIN)/python -m pytest -m slow --numprocesses auto --maxprocesses 4

test-long: $(DEV) ## Run the few tests that take half a minute and more, each
	$(BIN)/python -m pytest -m long --numprocesses auto --maxprocesses 4

stubs: $(DEV) ## Write the types of keyword arguments from the settings (training/keywords.pyi)
	$(BIN)/python tests/stubs.py

# Each environment takes up to 6 GB of disk and ten minutes, and is removed. One of them:
#     make try-newest PYTHON=python3.13
PINS_pinned := -c constraints.txt
PINS_lowest := 'torch==2.10.*' 'jsonargparse==4.43.*' 'numpy==1.26.*' 'torchmetrics==1.0.*'
PINS_torch-2.11 := 'torch==2.11.*'
PINS_newest :=

versions: try-pinned try-lowest try-torch-2.11 try-newest ## Try other versions of PyTorch and of the other packages (an hour, 6 GB)

try-%:
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(PYTHON) -m venv "$$folder/venv" && \
	  "$$folder/venv/bin/python" -m pip install $(PIP) --no-compile '.[dev]' $(PINS_$*) && \
	  "$$folder/venv/bin/python" tests/versions.py $*

pages: $(DEV) ## Measure the pages in benchmarks/ that take minutes, compare with the last time
	$(BIN)/python benchmarks/pages.py

course-page: $(DEV) ## Measure the systems course's report on this machine (hours) and write its page
	$(BIN)/python -m experiments.course
	mkdir -p benchmarks/course
	cd lightning_logs/report/course && find . -name '*.png' -o -name report.md \
	  | tar cf - -T - | tar xf - -C $(CURDIR)/benchmarks/course

docs: $(DOCS) ## Build the documentation site in build/site
	$(BIN)/python docs/build_site.py

check: check-format check-lint check-types check-imports check-spelling ## Check format, lint, types, imports, spelling

check-format: $(DEV)
	$(BIN)/ruff format --check .

check-lint: $(DEV)
	$(BIN)/ruff check .

check-types: $(DEV)
	$(BIN)/mypy

check-imports: $(DEV)
	$(BIN)/lint-imports

check-spelling: $(DEV)
	$(BIN)/codespell

format: $(DEV) ## Format the code and apply ruff's fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test-gpu: $(DEV) ## Run the tests that need a CUDA or MPS device
	$(BIN)/python -m pytest -m gpu

bench-gpu: $(DEV) ## Measure the four GPT-2 sizes on this GPU (about an hour)
	$(BIN)/gpt-lightning bench gpu

cpu-losses: $(BASE) ## Compare the GPU rungs' losses with a CPU's (an hour; 21 GB of memory)
	$(BIN)/gpt-lightning reproduce precision-ladder --accelerator cpu \
	  --rungs cpu-fp32,cpu-bf16,gpu-fp32,gpu-tf32,gpu-bf16,gpu-bf16-compile
	$(BIN)/gpt-lightning reproduce lecture-ladder --accelerator cpu \
	  --rungs bf16,compile,flash,vocab-50304

tensorboard: $(BASE) ## Show the runs in lightning_logs/
	@echo "open http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"
	$(BIN)/tensorboard --logdir lightning_logs

clean: ## Remove the environment, caches and build results (keeps runs and data)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find gpt_lightning tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Print one clear line for each thing that a fresh machine may lack. If the interpreter behind .venv
# no longer exists, its stamp is ignored and --clear recreates the environment.
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

# An interrupted or failed pip leaves no stamp, so the next call repeats that step.
PIP_INSTALL = $(BIN)/python -m pip install $(PIP) --disable-pip-version-check -c constraints.txt
PIP_FAILED = { \
  echo "pip failed. 'make PIP=-v $(MAKECMDGOALS)' shows more; 'make clean' starts again."; exit 1; }

$(BASE): pyproject.toml constraints.txt $(CREATED)
	@echo "Installing gpt_lightning and PyTorch in $(VENV): this takes 0.5 to 10 minutes ..."
	@$(PIP_INSTALL) -e . || $(PIP_FAILED)
	@touch $@

# Install only the list in an extra: `-e '.[dev]'` would reinstall gpt_lightning while a run may be
# using it.
INSTALL_EXTRA = $(BIN)/python -c 'import sys, tomllib; \
	  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"][sys.argv[1]], sep="\n")' $(1) > $(VENV)/$(1).txt && \
	  $(PIP_INSTALL) -r $(VENV)/$(1).txt || $(PIP_FAILED)

$(DEV): $(BASE)
	@echo "Installing the tools for tests and checks: a few seconds to a minute ..."
	@$(call INSTALL_EXTRA,dev)
	@touch $@

$(DOCS): $(DEV)
	@echo "Installing the tools for the documentation site: a few seconds to a minute ..."
	@$(call INSTALL_EXTRA,docs)
	@touch $@

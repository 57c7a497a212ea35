# One virtual environment, made on first need, serves every target. `make help` lists them.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# --no-compile: what is imported is compiled when it is, once; most of it never is.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
CODE   := pgra index_build train.py evaluate.py ablations benchmarks docs examples tests
# The oldest transformers that is allowed; TRANSFORMERS=VERSION takes another.
TRANSFORMERS ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)
OTHER  := $(VENV)/transformers-$(TRANSFORMERS)
READER := $(addprefix tests/unit/test_,fid.py predict.py reader_inputs.py reader_train.py ralm.py prompts.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-quick test-reader test-all clean

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## Make .venv and install everything that is pinned, once

$(STAMP): requirements.txt requirements-bundled.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "pgra needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@echo "setup: installing into $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --requirement requirements.txt
	@$(PIP) --no-deps --require-hashes --requirement requirements-bundled.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -W ignore -c 'import pgra.runs, index_build.__main__'
	@touch $@
	@echo "setup: done. Next: . $(BIN)/activate && pgra --help, or make demo"

demo: $(STAMP)  ## See it at work on real models and real text (three minutes on two quiet cores)
	@$(BIN)/pgra demo

check: $(STAMP)  ## ruff, ruff format, mypy --strict, and the limits on sizes
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py

test: check test-quick  ## All checks and all tests but those that need a GPU
	$(PYTEST) -m "slow and not gpu" --numprocesses 2 --dist loadfile --durations=20

test-quick: $(STAMP)  ## The quick tests: a minute on two quiet cores
	$(PYTEST) --numprocesses 2 --dist worksteal

test-reader: $(STAMP)  ## The reader's tests on the oldest transformers allowed, or TRANSFORMERS=VERSION
	@rm -rf $(OTHER) && $(PIP) --target $(OTHER) transformers==$(TRANSFORMERS)
	PYTHONPATH=$(OTHER) $(PYTEST) $(READER)

test-all: test  ## The same as test

clean:  ## Remove .venv and caches; runs, artefacts and converted models stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a newcomer or a developer types. Each target sets up what it needs in .venv.
#
#   make demo                     set up, then train a small chat model and talk to it
#   make setup TORCH=system       use the torch that is already installed (found on GPU machines by itself)
#   make setup TORCH=2.13.0       install that version of torch

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?=
# Tests hold many small tensors: one thread each is faster than two that wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup demo test test-extras check soak bench clean

help:
	@echo "make setup | demo | test | test-extras | check | soak | bench | clean"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml tools/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" sh tools/setup.sh

$(VENV)/.dev: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --editable ".[dev]" && touch $@

demo: $(VENV)/.installed
	@$(BIN)/nanochat run demo

# Everything that needs neither a GPU nor an extra.
test: $(VENV)/.dev
	$(PYTEST) -m "not extras and not soak"

# What needs an extra.
test-extras: $(VENV)/.dev
	$(PYTEST) -m extras

# Under a minute: format, lint, types, architecture, fast tests.
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q -m "not slow and not extras and not soak"

# The long ones.
soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/.dev
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make help` lists what there is. Everything happens in .venv inside this folder; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := flower,serve,report,hub,privacy,gpu,quant,lm-eval,tensorboard,bench,dev

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint format extras

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/' | expand -t 20

venv: $(STAMP) ## make .venv with the tested versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fednl needs Python 3.11 or newer, and '$(PYTHON)' is older or missing: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## seven unlike clients teach SmolLM2-135M to remember; minutes on two cores
	$(BIN)/fednl models get smollm2-135m
	@out=runs/demo; n=2; while [ -e "$$out" ]; do out=runs/demo-$$n; n=$$((n + 1)); done; \
	  echo "$(BIN)/fednl train configs/demo.toml --out $$out"; \
	  $(BIN)/fednl train configs/demo.toml --out "$$out" && \
	  $(BIN)/fednl report "$$out" && \
	  echo "Everything this run did is in $$out."

test: $(STAMP) ## every test: the quick ones, then those on the real model
	$(BIN)/python -m pytest
	$(BIN)/fednl models get smollm2-135m
	$(BIN)/python -m pytest -m real

test-fast: $(STAMP) ## the quick tests only
	$(BIN)/python -m pytest

lint: $(STAMP) ## ruff, strict mypy (of tests: that every name is there), import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks
	$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

extras: $(STAMP) ## check that every extra installs beside the others (installs nothing)
	$(BIN)/python -m pip install --disable-pip-version-check --dry-run --ignore-installed --quiet \
	  -c constraints.txt '.[$(EXTRAS)]'
	@echo "every extra resolves together: $(EXTRAS)"

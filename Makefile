# Needs Python 3.11 or newer with pip, and make. `make` alone lists the commands.
#   PYTHON=python3.12          the interpreter to make .venv with
#   PYTEST_ARGS="-k balancer"  more arguments for pytest
#   ARGS=--once                arguments for the demo
export PYTHON
PYTEST_ARGS ?=
ARGS ?=
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup lint types test test-fast test-long demo clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: ## make .venv with vLLM for the CPU, the test tools and this project
	@.ci/setup

lint: setup ## check style and format
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: setup ## check types
	$(PY) -m mypy vllm_omni_plugin $(wildcard entrypoints/*.py examples/*.py examples/*/*.py examples/*/*/*.py benchmarks/*.py benchmarks/*/*.py)

test: lint types ## lint, types and the whole test suite
	$(PY) -m pytest $(PYTEST_ARGS)

test-fast: lint types ## the same without the tests that start an engine
	$(PY) -m pytest -m "not engine" $(PYTEST_ARGS)

test-long: setup ## tests that take long and repeat in another way what others show; not part of the gate
	$(PY) -m pytest -m long $(PYTEST_ARGS)

demo: setup ## serve a tiny model with two replicas and talk to it
	@$(PY) -u examples/demo.py $(ARGS)

clean: ## remove what tools and the demo left; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +

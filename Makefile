# Needs Python 3.11 or newer with pip, and make. `make` alone lists the commands.
#   PYTHON=python3.12          the interpreter to make .venv with
#   VLLM=0.33                  tests with this vLLM instead of 0.32, in .venv-0.33
#   PYTEST_ARGS="-k balancer"  more arguments for pytest; -n 0 for one test after the other
#   ARGS=--once                arguments for the demo
#   RUST=1                     the demo with vLLM's Rust front end
export PYTHON
# Tests start a hundred processes; without it each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
VLLM ?= 0.32
PYTEST_ARGS ?=
ARGS ?=
RUST ?=
PY := .venv/bin/python
# What tests and the demo run with. Lint and types need .venv alone.
TEST_PY = $(if $(filter 0.32,$(VLLM)),$(PY),.venv-$(VLLM)/bin/python)
# What takes longest begins first (see tests/engine/conftest.py and tests/lanes.py).
LANES := --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
NEWEST := 0.33
SAME_ANSWERS := tests/engine/test_same_answers.py
# Of these only what is for vLLM's Rust front end.
BEHIND_RUST := tests/engine/test_hung_engine.py tests/engine/test_nodes_faults.py tests/engine/test_whole_engine_lora.py

.PHONY: help setup lint types suite check-suite check test test-long newest release-check demo docs monitoring clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

setup: ## make .venv with vLLM for the CPU, the test tools and this project
	@VLLM=$(VLLM) .ci/setup

lint: setup ## check style and format
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: setup ## check types
	$(PY) -m mypy vllm_omni_plugin $(wildcard .ci/*.py deploy/helm/files/*.py entrypoints/*.py examples/*.py examples/*/*.py examples/*/*/*.py benchmarks/*.py benchmarks/*/*.py tools/*.py)

suite: setup
	$(TEST_PY) -m pytest -n 3 $(LANES) --durations=30 $(PYTEST_ARGS)

check-suite: setup
	$(TEST_PY) -m pytest -m "not engine and not long" --ignore=tests/engine -n 3 $(LANES) $(PYTEST_ARGS)

# Types are checked beside the tests. Those of tests/project check layers and cycles of imports.
check: lint ## lint, types and the tests that start no engine: under two minutes
	@$(MAKE) --no-print-directory -j 2 types check-suite

test: lint ## the gate: the same, and the tests on real engines: under ten minutes
	@$(MAKE) --no-print-directory -j 2 types suite

test-long: .venv/long-test-requirements.txt ## tests that take long and repeat in another way what others show, and histories drawn at random
	$(TEST_PY) -m pytest -m "long or hypothesis" --hypothesis-profile=random $(PYTEST_ARGS)

# In no set-up, since the gate does not need it: 300 MB.
.venv/long-test-requirements.txt: examples/cpu/long-test-requirements.txt | setup
	$(PY) -m pip install -q --no-deps --disable-pip-version-check -r $<
	cp $< $@

newest: setup ## contract tests, "same answers", faults and adapters behind the Rust front end with the newest vLLM
	@VLLM=$(NEWEST) .ci/setup
	.venv-$(NEWEST)/bin/python -m pytest -n 2 $(LANES) $(PYTEST_ARGS) tests/contract $(SAME_ANSWERS) $(BEHIND_RUST) \
		-k "contract or $(basename $(notdir $(SAME_ANSWERS))) or vllm-rs"

release-check: ## build the archives of the last commit in dist/, twice the same, and check them
	$(or $(PYTHON),python3) -m venv .venv-release
	.venv-release/bin/python -m pip install -q build twine
	.venv-release/bin/python tools/release.py

demo: VLLM := $(if $(filter 1,$(RUST)),$(NEWEST),$(VLLM))
demo: setup ## serve a tiny model with two replicas and talk to it
	@$(TEST_PY) -u examples/demo.py $(if $(filter 1,$(RUST)),--rust) $(ARGS)

docs: .venv-docs/requirements.txt ## build the site of docs/ into build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict -f docs/site/mkdocs.yml

# An environment of its own: nothing else needs its packages.
.venv-docs/requirements.txt: docs/site/requirements.txt
	$(or $(PYTHON),python3) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -q -r $<
	cp $< $@

monitoring: ## start Prometheus with the rules of examples/monitoring, or say what to install
	@examples/monitoring/start.sh

clean: ## remove what tools and the demo left; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +

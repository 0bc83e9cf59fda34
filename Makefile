# Reef from a clean clone: `make demo` runs the main job, `make test` the tests. Both set up what they need and can be run again.
# PYTHON picks the interpreter; everything is installed into .venv, pinned by constraints.txt.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup model demo test lint test-fast test-sglang test-clients fuzz bench clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## make the environment in .venv

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "reef: Python 3.11 or newer is missing; install it or name it: make PYTHON=/path/to/python"; exit 1; }
	@command -v git >/dev/null || { echo "reef: git is missing; install it (Debian: apt-get install git)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "reef: Python's venv module is missing; install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "[1/3] environment in $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] PyTorch and build tools (the longest download)"
	@$(PIP) install -q -c constraints.txt torch numpy setuptools wheel ninja hatchling editables
	@echo "[3/3] Reef with its extras"
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[local,train,discover,dev]'
	@touch $@

model: setup  ## fetch the default language model into the cache
	@$(BIN)/reef model pull smollm2-135m-instruct

demo: model  ## run the main job: serve, record, report, train, evaluate, release, hot swap, roll back
	@$(BIN)/reef demo

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check reef_cli recipes tests benchmarks scripts
	@$(BIN)/ruff format --check -q reef_cli recipes tests benchmarks scripts
	@$(BIN)/mypy

test: model lint  ## everything that must pass
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-fast: setup  ## the tests that need no language model
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not model and not slow'

test-sglang: model  ## a real SGLang on the CPU: engines compared, pushes, a learning step, crashes (about 3 GB, once)
	@$(BIN)/python scripts/sglang_lane.py

test-clients: setup  ## install the real agents and clients from npm and PyPI and drive them against a stub (network)
	@REEF_TEST_CLIENTS=1 $(BIN)/python -m pytest --timeout 1200 tests/harness/test_clients.py tests/e2e/test_packages.py tests/e2e/test_agents.py

fuzz: setup  ## more than 10,000 odd requests to every route and dialect; writes benchmarks/results/fuzz.json
	@REEF_FUZZ_EXAMPLES=2500 REEF_FUZZ_OUT=benchmarks/results/fuzz.json $(BIN)/python -m pytest --timeout 3600 \
		tests/gateway/test_fuzz.py tests/gateway/test_fuzz_http.py tests/gateway/test_fuzz_inference.py tests/e2e/test_fuzz.py

clean:  ## remove the environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup system demo test lint type faults bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/installed ## make the virtual environment with all that is needed

# torch first and from pip alone: every other order may pull a CUDA build.
$(VENV)/installed: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q setuptools wheel numpy
	$(BIN)/python -m pip install -q --no-build-isolation 'deepspeed>=0.14'
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-build-isolation --editable .
	touch $@

system: ## install the system packages of the test bed (root, apt), where they are missing
	scripts/setup-test-machine

demo: setup system ## refuse a wrong hostfile, train, name a crash and a hang, on two nodes of this machine
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo

test: setup system ## all tests, those on the real test bed among them
	$(BIN)/python -m pytest $(TESTS)

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## mypy, strict
	$(BIN)/mypy

faults: setup system ## the fault matrix on the real test bed (10 minutes); writes build/faults.json
	$(BIN)/python scripts/faults $(FAULTS)

bench: setup system ## measure against pdsh, clush and deepspeed; writes build/bench.json
	$(BIN)/python benchmarks/run.py $(BENCH)

clean: ## remove what the build made (not the virtual environment)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each target makes the virtual environment by itself when it is missing or older than what it was made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: .venv demo test test-rest test-all test-long lint bench clean

.venv: $(STAMP)

# The constraints keep torch to a build for the CPU, as on a newcomer's laptop; on a GPU machine install your own.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "zeus-plugins needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, mostly PyTorch) …"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/zeus-plugins demo

# Processes of the tests read what the first of them has compiled, pytest's own files among it.
test test-rest test-all test-long: export PYTHONDONTWRITEBYTECODE :=

# A file's tests share servers and processes, so that they stay together; the files come as tests/conftest.py says.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What a change may break, in five minutes on two cores.
test: $(STAMP)
	@$(PYTEST) -m "not slow" --hypothesis-profile fast --durations 10

# What `make test` left out, and more examples of what it took samples of.
test-rest: $(STAMP)
	@$(PYTEST) -m "slow or hypothesis" --durations 10

test-all: $(STAMP)
	@$(PYTEST) --durations 10

# Those of the tests that are left to chance, for about forty minutes instead of three.
test-long: export ZEUS_TEST_CHAOS_S ?= 600
test-long: export ZEUS_TEST_FUZZ_EXAMPLES ?= 200
test-long: $(STAMP)
	@$(BIN)/pytest -m "chaos or fuzz"

lint: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .zeus-peer .demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

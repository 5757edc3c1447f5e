# Each target makes the virtual environment by itself when it is missing or older than what it was made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: .venv demo screenshots test test-rest test-all test-long lint bench proof reference docs licences release-check clean

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

# The pictures of the dashboard in the documentation, of a demo's database; they need a browser.
screenshots: demo
	@$(BIN)/python -m tests.support.screenshots .demo/bso.sqlite3 docs/images

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

# Real recurring trainings; QUICK=1 shows in minutes that all works. What was measured stays, and the next call goes on.
PROOF := .proof/$(if $(QUICK),quick,all)
proof: $(STAMP)
	@$(BIN)/python -m benchmarks.recurrences run $(if $(QUICK),--quick) --state $(PROOF)
	@$(BIN)/python -m benchmarks.recurrences collect --state $(PROOF) --results $(PROOF)/results.json --images $(PROOF)

# The pages of the documentation that follow from the code: settings, commands, routes.
reference: $(STAMP)
	@$(BIN)/python -m docs.generated

# The documentation as a site that opens without a network: build/docs/index.html.
docs: $(STAMP)
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --fresh-env --quiet docs build/docs
	@echo "Open build/docs/index.html"

# The page of the licences of all dependencies, as pip finds them by now.
licences:
	@$(PYTHON) -m release licences

# Both packages and the bill of materials, and their installation with each extra by each of these interpreters.
RELEASE_PYTHONS ?= $(PYTHON)
release-check:
	@$(PYTHON) -m release build
	@$(PYTHON) -m release check $(foreach python,$(RELEASE_PYTHONS),--python $(python)) $(RELEASE_OPTIONS)

clean:
	rm -rf $(VENV) .zeus-peer .zeus-peer.lock .demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

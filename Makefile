# Each target makes the virtual environment by itself when it is missing or older than what it was made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: .venv demo screenshots test test-rest test-all test-long test-minimum coverage lint bench proof gpu-bundle
.PHONY: reference docs
.PHONY: lock licences audit release-check clean

.venv: $(STAMP)

# Everybody develops with the same versions, which `make lock` renews. Torch is a build for the CPU where the index has
# one, as on a newcomer's laptop; on a GPU machine install your own.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "zeus-plugins needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, mostly PyTorch) …"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt torch --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/zeus-plugins demo

# The pictures of the dashboard in the documentation, of a demo's database; they need a browser.
screenshots: demo
	@$(BIN)/python -m tests.support.screenshots .demo/bso.sqlite3 docs/images

# Processes of the tests read what the first of them has compiled, pytest's own files among it.
test test-rest test-all test-long: export PYTHONDONTWRITEBYTECODE :=

# Tests of one file share servers and processes and stay together. Files with many tests start first.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 6 --dist loadfile

# What a change may break, in about four minutes on two idle cores.
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

# The tests with the lowest versions of the users' dependencies that pyproject.toml allows; of torch, the only version that
# was tested. The tools of the tests are the latest that go with those of KEPT; they raise another where they need more. uv does not read pip's settings, such as PIP_FIND_LINKS.
MINIMUM := build/minimum
KEPT := httpx|lightning|litestar|pydantic|transformers
UV_INSTALL = $(MINIMUM)/bin/uv pip install --quiet --python $(MINIMUM)/bin/python --constraint constraints.txt \
	$(addprefix --find-links ,$(PIP_FIND_LINKS))
# Old Lightning calls the latest jsonargparse in ways that the latter gives up.
test-minimum: export JSONARGPARSE_DEPRECATION_WARNINGS := off
test-minimum:
	@$(PYTHON) -m venv --clear $(MINIMUM)
	@$(MINIMUM)/bin/pip install --quiet uv
	@$(UV_INSTALL) --resolution lowest-direct torch --editable '.[all]'
	@$(MINIMUM)/bin/uv pip freeze --quiet --python $(MINIMUM)/bin/python | grep -E '^($(KEPT))==' > $(MINIMUM)/lowest.txt
	@$(UV_INSTALL) --constraint $(MINIMUM)/lowest.txt --editable '.[dev]'
	@$(MINIMUM)/bin/pytest --numprocesses auto --maxprocesses 6 --dist loadfile -m "not slow" --hypothesis-profile fast

# The share of both packages that the tests run in their own processes; what they start as processes is not seen.
coverage: $(STAMP)
	@$(BIN)/pip install --quiet --constraint constraints-dev.txt --editable '.[maintenance]'
	@$(PYTEST) -m "not slow" --hypothesis-profile fast --cov --cov-report term:skip-covered

# The size of both packages. This limit is never raised: a feature that needs room takes it from another.
MOST_LINES := 37500

lint: $(STAMP)
	@lines=$$(find zeus_plugins bso_server -name '*.py' -exec cat {} + | wc -l); [ $$lines -le $(MOST_LINES) ] \
		|| { echo "zeus_plugins and bso_server have $$lines lines, more than MOST_LINES in the Makefile, $(MOST_LINES)"; exit 1; }
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python -m docs.prose
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive zeus_plugins bso_server
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.fleet_load --seconds 45

# Real recurring trainings, two tasks at a time; QUICK=1 shows in minutes that all works. What was measured stays, and the
# next call goes on. PROOF_EXTENT="--seeds 1 --repeats 0" bounds the trainings.
PROOF := .proof/$(if $(QUICK),quick,all)
PROOF_TASKS := characters topics digits digits-adam fine-tuning tabular drift
proof: $(STAMP)
	@printf '%s\n' $(PROOF_TASKS) | xargs -P 2 -I TASK $(BIN)/python -m benchmarks.recurrences run \
		$(if $(QUICK),--quick) $(PROOF_EXTENT) --tasks TASK --state $(PROOF)/TASK
	@$(BIN)/python -m benchmarks.recurrences collect --state $(addprefix $(PROOF)/,$(PROOF_TASKS)) \
		--results $(PROOF)/results.json --images $(PROOF)

# One folder that measures for an hour on a GPU machine without a network: docs/proof.md.
gpu-bundle: $(STAMP)
	@$(BIN)/python -m benchmarks.bundle gpu-bundle

# The pages of the documentation that follow from the code: settings, commands, routes.
reference: $(STAMP)
	@$(BIN)/python -m docs.generated

# The documentation as a site that opens without a network: build/docs/index.html.
docs: $(STAMP)
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --fresh-env --quiet docs build/docs
	@echo "Open build/docs/index.html"

# The versions with which everybody develops: the latest of all dependencies.
lock: $(STAMP)
	@$(BIN)/pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --extra dev --extra integrations \
		--extra maintenance --constraint constraints.txt --no-annotate --custom-compile-command "make lock" \
		--output-file constraints-dev.txt

# The page of the licences of all dependencies, as the packages state them by now.
licences:
	@$(PYTHON) -m release licences

# Known vulnerabilities of the versions for development, if an index of advisories can be reached.
audit:
	@$(PYTHON) -m release audit

# Both packages and the bill of materials, and their installation with each extra by each of these interpreters.
RELEASE_PYTHONS ?= $(PYTHON)
release-check:
	@$(PYTHON) -m release build
	@$(PYTHON) -m release check $(foreach python,$(RELEASE_PYTHONS),--python $(python)) $(RELEASE_OPTIONS)

clean:
	rm -rf gpu-bundle $(VENV) .zeus-peer .zeus-peer.lock .demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

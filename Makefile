# On a new machine with Python and pip, run `make quickstart` or `make test`.
# To use another interpreter, run `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist worksteal
# Lists of tests that have a target of their own.
NO_LIST := not layouts and not long and not matrix and not faults and not wheel and not timing and not oracle and not trackers

# Version of the constraints file for this Python: 311 or 312. The environment is rebuilt when the
# version changes.
LANE := $(shell $(PYTHON) -c 'import sys; print(311 if sys.version_info < (3, 12) else 312)')
CONSTRAINTS := constraints/py$(LANE).txt
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
BASE := $(VENV)/installed-$(LANE)
DEV := $(VENV)/installed-dev-$(LANE)
DOCS := $(VENV)/installed-docs-$(LANE)

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: help quickstart test test-fast test-slow test-times test-all test-timing test-layouts test-long test-matrix test-faults test-wheel test-oracle test-trackers check docs site site-serve bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "make %-13s %s\n", $$1, $$2}'

quickstart: $(BASE)  ## install, then train a small model on this machine
	@$(BIN)/maxpipe train configs/quickstart.yml

test: $(DEV)  ## run all tests but those of the targets below (ten minutes)
	@$(BIN)/python -m pytest -m "not slow and $(NO_LIST)" $(PYTEST_ARGS)

test-fast: $(DEV)  ## run only tests that take less than 0.05 s (under a minute)
	@$(BIN)/python -m pytest -m "not slow and not medium and not multihost and $(NO_LIST)" $(PYTEST_ARGS)

test-slow: $(DEV)  ## tests that take 2 seconds or more (a quarter of an hour)
	@$(BIN)/python -m pytest -m "slow and $(NO_LIST)" $(SLOW_ARGS) $(PYTEST_ARGS)

test-times: $(DEV)  ## run the tests of test and test-slow, and record their times in tests/times.json
	@$(BIN)/python -m pytest --record-times $(PYTEST_ARGS)

test-all: test test-slow test-timing test-layouts test-long test-wheel  ## all tests but test-matrix, test-faults, test-oracle and test-trackers

test-timing: $(DEV)  ## run tests that compare measured times, on an idle machine (3 minutes)
	@$(BIN)/python -m pytest -m timing tests/planner

test-layouts: $(DEV)  ## test more meshes, schedules and model families than `make test` (30 to 60 minutes)
	@$(BIN)/python -m pytest -m layouts tests/pipeline tests/train tests/generation tests/model tests/planner tests/parallel tests/huggingface $(LAYOUTS_ARGS) $(PYTEST_ARGS)

test-long: $(DEV)  ## run complete examples from the docs, and other long tests (10 minutes)
	@$(BIN)/python -m pytest -m long $(LONG_ARGS) $(PYTEST_ARGS)

test-matrix: $(DEV)  ## test all combinations of schedule, gather, remat, idle mode and stages (1 hour)
	@$(BIN)/python -m pytest -m matrix tests/pipeline tests/step/test_step.py -n 2

test-faults: $(DEV)  ## test runs that are killed, hang and resume (30 minutes)
	@$(BIN)/python -m pytest -m faults -n 2

test-wheel: $(DEV)  ## install the wheel with every available Python, and train (a few minutes)
	@$(BIN)/python -m pytest -m wheel tests/test_wheel.py $(WHEEL_ARGS)

# transformers and torch may be in a separate environment: make ORACLE=.../bin/python test-oracle
test-oracle: $(DEV)  ## compare with transformers and XProf, if installed
	@ORACLE=$(ORACLE) $(BIN)/python -m pytest -m oracle tests/huggingface tests/data tests/profiles

# The clients may be in a folder: pip install --target FOLDER wandb mlflow trackio ...
test-trackers: $(DEV)  ## compare values in experiment trackers with metrics.jsonl; TRACKERS names a folder of clients
	@TRACKERS=$(TRACKERS) $(BIN)/python -m pytest -m trackers tests/telemetry/trackers

check: $(DEV)  ## check formatting, lint, types, prose, and that generated docs are up to date
	@$(BIN)/ruff format --check --quiet --output-format concise . || \
	  { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python scripts/reference_pages.py --check
	@$(BIN)/python scripts/prose.py

docs: $(DEV)  ## regenerate the generated parts of docs/, README.md and CONTRIBUTING.md
	@$(BIN)/python scripts/reference_pages.py
	@$(BIN)/python -m pytest -q --update-golden tests/test_docs.py tests/test_architecture.py \
	  tests/test_claims.py tests/test_pictures.py tests/api/test_pages.py -k 'not code_in_guide'

site: $(DOCS)  ## build the documentation site in site/, and check its links
	@$(MKDOCS) build --strict

site-serve: $(DOCS)  ## show the documentation site in a browser, and update it after each edit
	@$(MKDOCS) serve

bench: $(DEV)  ## benchmark the schedules against reference implementations on this machine
	@$(BIN)/python benchmarks/schedules.py

clean:  ## remove the environment, caches and build output; keep runs/
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python-$(LANE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "maxpipe requires Python 3.11 or newer. Select one: make PYTHON=python3.12 ...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(BASE): pyproject.toml $(CONSTRAINTS) | $(VENV)/python-$(LANE)
	@echo "installing maxpipe into $(VENV) (takes minutes the first time)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(DOCS): pyproject.toml $(CONSTRAINTS) | $(VENV)/python-$(LANE)
	@echo "installing maxpipe and the tools of its documentation site into $(VENV)"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $(BASE) $@

$(DEV): pyproject.toml $(CONSTRAINTS) | $(VENV)/python-$(LANE)
	@echo "installing maxpipe and its development tools into $(VENV) (takes minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(BASE) $@

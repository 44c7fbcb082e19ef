# Everything a fresh machine with Python and pip needs: `make quickstart`, `make test`.
# Another interpreter: `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist worksteal

# 311 or 312: which pinned set fits this Python. The environment is rebuilt when it changes.
LANE := $(shell $(PYTHON) -c 'import sys; print(311 if sys.version_info < (3, 12) else 312)')
CONSTRAINTS := constraints/py$(LANE).txt
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
BASE := $(VENV)/installed-$(LANE)
DEV := $(VENV)/installed-dev-$(LANE)

.PHONY: help quickstart test test-fast test-timing test-layouts test-long test-matrix test-faults test-wheel test-oracle check docs bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

quickstart: $(BASE)  ## install, then train a small model on this machine
	@$(BIN)/maxpipe train configs/quickstart.yml

test: $(DEV)  ## run all tests but those of the targets below
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: $(DEV)  ## run the tests that take seconds
	@$(BIN)/python -m pytest -m "not slow and not multihost and not layouts and not long and not matrix and not faults and not wheel and not timing and not oracle" $(PYTEST_ARGS)

test-timing: $(DEV)  ## what compares times; leave the machine alone (three minutes)
	@$(BIN)/python -m pytest -m timing tests/plan

test-layouts: $(DEV)  ## more meshes, schedules and families than `make test` (half an hour to an hour)
	@$(BIN)/python -m pytest -m layouts tests/pipeline tests/train tests/generate tests/model tests/plan tests/parallel tests/huggingface $(LAYOUTS_ARGS) $(PYTEST_ARGS)

test-long: $(DEV)  ## whole examples of the docs, and runs that take long (ten minutes)
	@$(BIN)/python -m pytest -m long $(LONG_ARGS) $(PYTEST_ARGS)

test-matrix: $(DEV)  ## every schedule x gather x remat x idle x stages (an hour)
	@$(BIN)/python -m pytest -m matrix tests/pipeline tests/step/test_step.py -n 2

test-faults: $(DEV)  ## runs that are killed, hang and go on (half an hour)
	@$(BIN)/python -m pytest -m faults -n 2

test-wheel: $(DEV)  ## install the wheel on every Python that is here, and train (minutes)
	@$(BIN)/python -m pytest -m wheel tests/test_wheel.py $(WHEEL_ARGS)

# Transformers and torch may live in an environment of their own: make ORACLE=.../bin/python ...
test-oracle: $(DEV)  ## logits of Hugging Face folders against transformers, where it is installed
	@ORACLE=$(ORACLE) $(BIN)/python -m pytest -m oracle tests/huggingface tests/data

check: $(DEV)  ## format, lint, types, and whether generated docs are up to date
	@$(BIN)/ruff format --check --quiet --output-format concise . || \
	  { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/maxpipe config docs --check
	@$(BIN)/python scripts/prose.py

docs: $(DEV)  ## write what is generated in docs/ and README.md
	@$(BIN)/maxpipe config docs
	@$(BIN)/python -m pytest -q --update-golden tests/test_docs.py tests/test_architecture.py

bench: $(DEV)  ## measure the schedules against their references on this machine
	@$(BIN)/python benchmarks/schedules.py

clean:  ## remove the environment, caches and build output; runs/ stays
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python-$(LANE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "maxpipe needs Python 3.11 or newer. Name one: make PYTHON=python3.12 ...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(BASE): pyproject.toml $(CONSTRAINTS) | $(VENV)/python-$(LANE)
	@echo "installing maxpipe into $(VENV) (minutes, the first time)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV): pyproject.toml $(CONSTRAINTS) | $(VENV)/python-$(LANE)
	@echo "installing maxpipe and its development tools into $(VENV) (minutes, the first time)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(BASE) $@

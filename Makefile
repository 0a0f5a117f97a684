# Two commands on a fresh machine: `make demo` and `make test`. Both make the virtual environment in .venv first.
BASE_PYTHON ?= python3
VENV ?= .venv
# Absolute: launch scripts run it from other folders.
PYTHON := $(abspath $(VENV))/bin/python
export PYTHON

.PHONY: demo demo-seeds test test-slow test-faults test-gpu bench check audit reference clean

demo: $(VENV)/installed
	$(PYTHON) -m demo.run

demo-seeds: $(VENV)/installed
	$(PYTHON) -m demo.seeds

test: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m "not slow and not faults and not gpu"

test-slow: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m "slow and not gpu"

test-faults: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m "faults and not gpu"

test-gpu: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m gpu

# A row of tests/bench and its options: make bench ROW="step3 --batch 128"
ROW ?= step3
bench: $(VENV)/installed
	$(PYTHON) tests/bench $(ROW)

check: $(VENV)/installed-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

audit: $(VENV)/installed-dev
	$(PYTHON) -m pip install --quiet --disable-pip-version-check pip-audit
	$(PYTHON) -m pip_audit -r requirements.txt

reference: $(VENV)/installed
	$(PYTHON) docs/make_configuration.py
	$(PYTHON) docs/make_files.py

$(VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
	    f"error: {sys.executable} is Python {v[0]}.{v[1]}; wanted 3.11 or 3.12: make BASE_PYTHON=python3.12 ...")'
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) output

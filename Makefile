# Two commands on a fresh machine: `make demo` and `make test`. Both make the virtual environment in .venv first.
BASE_PYTHON ?= python3
VENV ?= .venv
# Absolute: launch scripts run it from other folders.
PYTHON := $(abspath $(VENV))/bin/python
export PYTHON
# Lists of packages besides requirements.txt, each with a lock of its own: requirements/dev.txt and dev.lock.
FOR_TESTS = dev trl trackers
ADDED = $(FOR_TESTS) site
PIP_INSTALL = $(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL_ADDED = $(PIP_INSTALL) $(foreach part,$(1),-c requirements/$(part).lock -r requirements/$(part).txt)

.PHONY: demo demo-grpo demo-tools demo-seeds test test-quick test-slow test-faults test-hosts test-gpu bench check audit constraints sbom site readings plans stale clean

demo: $(VENV)/installed
	$(PYTHON) -m demo.run

# No reward model: the rule itself rewards, as a function.
demo-grpo: $(VENV)/installed
	$(PYTHON) -m demo.run --method grpo --overwrite

# An environment of several turns: a tiny model learns to use the answers of a game.
demo-tools: $(VENV)/installed
	$(PYTHON) -m demo.tools

demo-seeds: $(VENV)/installed
	$(PYTHON) -m demo.seeds

# Two workers of one thread each. The tests of a file stay on one worker: they share runs.
WORKERS ?= 2
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes, each of which would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

# These run on the CPU, also where there are GPUs.
test test-slow test-faults test-hosts: export DS_ACCELERATOR = cpu
test test-slow test-faults test-hosts: export CUDA_VISIBLE_DEVICES =

# All folders, or some of them: make test FOLDERS="tests/engine tests/kernels"
FOLDERS ?=
test: $(VENV)/installed-dev
	$(PYTEST) -m "not slow and not faults and not hosts and not gpu" $(FOLDERS)

# Two minutes on two cores: numbers, settings, data and losses. What starts several ranks there is a slow test.
QUICK = $(addprefix tests/,mathematics flags configuration data leaves \
    step3_dpo/test_dpo_loss.py step3_dpo/test_kto_loss.py step3_dpo/test_reference_file.py)
test-quick: FOLDERS = $(QUICK)
test-quick: test

# Parts of at most ten minutes: all in turn, or one of them by `make test-slow SHARDS=2/5`.
SHARDS ?= 1/5 2/5 3/5 4/5 5/5
test-slow: $(VENV)/installed-dev
	set -e; for shard in $(SHARDS); do $(PYTEST) -m "slow and not gpu" --shard $$shard; done

test-faults: $(VENV)/installed-dev
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal -m "faults and not gpu"

# Several hosts, each with its own sshd (openssh-server): network namespaces as root (iproute2), else loopback addresses.
test-hosts: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m hosts

# Parts of less than nine minutes on one GPU: all in turn, or PART=1/3; PART=two needs two GPUs.
PART ?= 1/3 2/3 3/3
test-gpu: $(VENV)/installed-dev
	set -e; for part in $(PART); do \
	if [ $$part = two ]; then $(PYTHON) -m pytest -m two_gpus; \
	else $(PYTHON) -m pytest -m "gpu and not two_gpus" --shard $$part; fi; done

# A row of benchmarks/speed and its options: make bench ROW="step3 --batch 128"
ROW ?= step3
bench: $(VENV)/installed
	$(PYTHON) -m benchmarks.speed $(ROW)

check: $(VENV)/installed-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# Asks an advisory service about every package of constraints.txt, without installing any.
audit: $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet pip-audit
	sed -e '/--hash/d' -e 's/ \\$$//' constraints.txt > $(VENV)/audited.txt
	$(PYTHON) -m pip_audit --strict --no-deps --disable-pip -r $(VENV)/audited.txt

# The newest versions are taken for packages that are not in the files yet. Builds of torch and of what comes with it
# differ by index: they have no hashes. A lock in requirements/ holds what its list adds to constraints.txt,
# where a package that is locked there for some platforms alone is added for all.
COMPILE = $(PYTHON) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
    --custom-compile-command "make constraints"
constraints: $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet uv
	$(COMPILE) requirements.txt -o constraints.txt
	awk '/^[^ ]/ { bare = /^(torch|triton|nvidia-|cuda-)/ } bare && /--hash/ { next } bare { sub(/ \\$$/, "") } { print }' \
	    constraints.txt > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt
	set -e; for part in $(ADDED); do \
	$(COMPILE) -c constraints.txt requirements/$$part.txt -o requirements/$$part.lock; \
	awk '/^[^ #]/ { line = $$0; sub(/ \\$$/, "", line); skip = line in known || $$1 in known } \
	    FILENAME == "constraints.txt" { if (/^[^ #]/) known[line]; next } !skip' \
	    constraints.txt requirements/$$part.lock > $(VENV)/part.lock; \
	mv $(VENV)/part.lock requirements/$$part.lock; done

sbom: $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet cyclonedx-bom
	$(PYTHON) -m cyclonedx_py requirements constraints.txt --output-reproducible --output-file sbom.json

# The documentation as a site, opened by site/index.html. It needs no network when it is read.
site: export DS_ACCELERATOR = cpu
site: export NO_MKDOCS_2_WARNING = 1
site: $(VENV)/installed-site
	$(PYTHON) -m mkdocs build --strict --quiet

plans: export HF_HUB_OFFLINE = 1  # shapes are those of launch/shapes.yaml
plans: $(VENV)/installed
	$(PYTHON) -m website.presets

# Sizes and imports of the code, each with its limit (tests/project/test_readings.py).
readings: $(VENV)/installed-dev
	@PYTHONPATH=tests $(PYTHON) tests/project/test_readings.py

# What has changed since the figures of each page were measured.
stale:
	@$(BASE_PYTHON) benchmarks/stale.py

$(VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info[:2]; name = "%s is Python %d.%d" % (sys.executable, *v); \
	    v < (3, 11) and sys.exit(f"error: {name}; needs 3.11 or newer: make BASE_PYTHON=python3.12 ..."); \
	    v > (3, 13) and print(f"note: {name}, not tested; tested are 3.11 to 3.13", file=sys.stderr)'
	$(BASE_PYTHON) -m venv $(VENV)

# Where there is no NVIDIA GPU the small CPU build of torch is installed, if its index can be reached. To choose:
# `make demo TORCH_INDEX=` takes the CUDA build, `TORCH_INDEX=URL` that of another index.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia* /dev/dxg),,https://download.pytorch.org/whl/cpu)
FROM_INDEX = $(if $(TORCH_INDEX),--retries 1 --timeout 30 --extra-index-url $(TORCH_INDEX))
# Packages without hashes are installed first: pip asks for the hash of all that it installs from a file that has any.
INSTALL_UNHASHED = grep '^$(1)==' constraints.txt > $(VENV)/$(1).txt && \
    $(PYTHON) -m pip install --quiet $(FROM_INDEX) -r $(VENV)/$(1).txt

$(VENV)/installed: requirements.txt constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet "pip>=26.3"  # older ones take no constraints with hashes
	$(call INSTALL_UNHASHED,torch)
	$(PIP_INSTALL) -r requirements.txt
	touch $@

$(VENV)/installed-dev: $(foreach part,$(FOR_TESTS),requirements/$(part).txt requirements/$(part).lock) $(VENV)/installed
	$(call INSTALL_UNHASHED,triton)
	$(call INSTALL_ADDED,$(FOR_TESTS))
	touch $@

$(VENV)/installed-site: requirements/site.txt requirements/site.lock $(VENV)/installed
	$(call INSTALL_ADDED,site)
	touch $@

clean:
	rm -rf $(VENV) output site

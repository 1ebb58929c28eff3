# `make train` and `make test` need Python 3.10 to 3.13 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-all test-gpu test-keras conformance faults bench slurm docs figures lint install clean

train: install
	$(BIN)/python -m tfmulti.train --strategy mirrored --workdir runs/default

test: install
	$(BIN)/python -m pytest --numprocesses=2

# Everything, the slow ones too, in parts: make test-all PART=2/8 runs the second of eight. It tries
# each row of the matrix on three replicas and on one cluster; make conformance on all.
PART ?= 1/1

test-all: install
	$(BIN)/python -m pytest --numprocesses=2 -m "slow or not slow" --part $(PART)

# Measures every guarantee under every strategy and on stock Keras; writes CONFORMANCE.md. In
# parts: make conformance PART=2/8 measures the second of eight. CONFORMANCE.json, which is in the
# repository, keeps the rows, and CONFORMANCE.md is written once it has all.
conformance: install
	PYTHONPATH=tests $(BIN)/python -m conformance --part $(PART)
	$(BIN)/python docs/figures.py

# Puts faults into real workers and prints what comes of each.
faults: install
	PYTHONPATH=tests $(BIN)/python -m faults

# Measures steps, all-reduce and start on this machine, with PyTorch where it is installed; writes
# BENCHMARKS.md.
bench: install
	$(BIN)/python -m benchmarks --project 1024 --verify always --write_markdown BENCHMARKS.md
	$(BIN)/python docs/figures.py

# Pages in build/docs.
docs: install
	$(BIN)/python -m mkdocs build --strict

# The short tables of README.md, from CONFORMANCE.md and BENCHMARKS.md.
figures: install
	$(BIN)/python docs/figures.py

# Starts a Slurm of its own on this machine and trains under it; needs the packages slurm-wlm and
# munge of Debian or Ubuntu.
slurm: install
	$(BIN)/python experiments/slurm/one_host.py

# On a machine with a GPU: what only a GPU shows, and the tests that create their own strategies, on
# four parts of one GPU. Elsewhere TFMULTI_TESTS_ON=collectives makes CPUs reduce as GPUs do.
TFMULTI_TESTS_ON ?= GPU

test-gpu: install
	$(BIN)/python -m pytest tests/test_real_gpu.py
	TFMULTI_TESTS_ON=$(TFMULTI_TESTS_ON) $(BIN)/python -m pytest --numprocesses=4 \
		$$(grep -l "replicas import" tests/test_*.py)

# Another version of Keras, in an environment of its own: make test-keras KERAS=3.12.0. The whole
# matrix, each row on three replicas and on one cluster.
KERAS ?= 3.12.0
KERAS_BIN := .venv-keras-$(KERAS)/bin

test-keras:
	test -x $(KERAS_BIN)/python || $(PYTHON) -m venv .venv-keras-$(KERAS)
	$(KERAS_BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]" "keras==$(KERAS)"
	$(KERAS_BIN)/python -m pytest --numprocesses=2 -m "slow or not slow" tests/conformance \
		tests/test_keras_compat.py -k "not random"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(STAMP)

# Made again only where what it installs has changed.
$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-keras-* build dist *.egg-info

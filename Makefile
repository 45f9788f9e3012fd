# The few commands people type. Everything is installed into .venv from this project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# $(VENV)/.EXTRA is there when all that `.[EXTRA]` needs is installed; .dev brings all the others.
DEV := $(VENV)/.dev
has = $(or $(wildcard $(DEV)),$(VENV)/.$1)
RL := rl,box2d

.DEFAULT_GOAL := help
.PHONY: help install demo rl-demo test test-all quick docs check system lint types dist try bench attack sbom pins clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

# uv takes seconds, and chooses the build of torch by this machine's accelerator. Without uv, or where
# that build cannot be had, pip installs. Nothing is compiled yet: of torch's modules few are ever
# loaded, and Python keeps those then.
UV = command -v uv >/dev/null && uv venv -q --seed --allow-existing -p $(PYTHON) $(VENV) \
	&& uv pip install -q -p $(VENV) --torch-backend auto -c constraints.txt -e ".[$*]"
PIP = $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q --no-compile \
	--disable-pip-version-check -c constraints.txt -e ".[$*]"

$(VENV)/.%: pyproject.toml constraints.txt
	@echo "installing Atoll and what \"$*\" needs into $(VENV) ..."
	@{ $(UV); } || { $(PIP); }
	@touch $@

install: $(DEV)  ## make .venv and install Atoll into it, with all that development needs

demo: $(call has,train)  ## four nodes on this machine train one small GPT, about two minutes
	@PYTHONDONTWRITEBYTECODE= $(BIN)/atoll demo

rl-demo: $(call has,$(RL))  ## four policies in four environments and one pooled critic, about a minute on two cores
	@PYTHONDONTWRITEBYTECODE= $(BIN)/atoll run examples/pooled_critic.toml --local 5

dist: $(DEV)  ## build sdist and wheel into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

try: dist  ## install the wheel into an empty environment and try it there, without the clone
	$(PYTHON) -m bench.first_run --quick

system:  ## Debian packages that the browser, network and container tests use (needs root)
	apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends chromium iproute2 util-linux docker.io nginx-light \
		munge slurmctld slurmd slurm-client openssh-client openssh-server curl golang-go

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

check: lint types  ## ruff, format check, mypy strict

# Long files first (tests/order.py). Many tests wait for others more than they compute, so five of
# them keep two cores busy.
WORKERS ?= 5
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Every worker loads all tests. In a fresh clone each of them would compile the same 3,000 modules,
# 20 s of processor time per worker: two processes do that first, once per clone. What cannot be
# loaded is shown by the tests.
COMPILED := $(VENV)/.compiled
$(COMPILED): $(DEV)
	@echo "compiling the tests and what they load ..."
	@find tests -name 'test_*.py' | sort | PYTHONDONTWRITEBYTECODE= xargs -P 2 -n 330 \
		$(BIN)/python -m pytest -q --collect-only >/dev/null || true
	@touch $@

test: $(COMPILED)  ## every promise, ten minutes on two cores: all tests but the long ones
	$(PYTEST) -m "not long" $(PYTEST_OPTIONS)

test-all: $(COMPILED)  ## all tests, the long ones too: sweeps, networks, containers (half an hour)
	$(PYTEST) --hypothesis-profile=whole $(PYTEST_OPTIONS)

quick: $(DEV)  ## the quickest files of every room, for every save
	$(PYTEST) -q -m "not long" $(PYTEST_OPTIONS) $$($(BIN)/python -m tests.order quick)

docs: $(DEV)  ## check the documentation and build its site into dist/docs
	$(BIN)/python -m pytest -q tests/test_documents.py tests/test_public_names.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q
	@echo "$(BIN)/python -m http.server -d dist/docs shows it"

bench: $(DEV)  ## every benchmark, quick form
	@for name in loop reduce hub queue relay page diloco methods rl.collect rl.queue pooled; do $(BIN)/python -m bench.$$name --quick || exit 1; done

EXTRAS ?= train,store
comma := ,
sbom: $(DEV)  ## what an installation consists of, as CycloneDX: dist/sbom.json
	mkdir -p dist
	$(BIN)/python deploy/sbom.py $(subst $(comma), ,$(EXTRAS)) > dist/sbom.json

# Every file of every package, for all systems: `pip install --require-hashes -r dist/requirements.txt`,
# then `pip install --no-deps .`. It is made where it is used, from the index that is used there.
pins: $(DEV)  ## versions of constraints.txt with the hashes of their files: dist/requirements.txt
	mkdir -p dist
	$(BIN)/uv pip compile -q pyproject.toml $(foreach one,$(subst $(comma), ,$(EXTRAS)),--extra $(one)) \
		-c constraints.txt --universal --generate-hashes --no-emit-index-url --no-header --no-annotate \
		-o dist/requirements.txt

# MINUTES of fuzzing, shared by all decoders.
MINUTES ?= 10
attack: $(DEV)  ## attack real hubs, nodes and jobs as outsiders do, and fuzz every decoder
	$(BIN)/python -m bench.attack --minutes $(MINUTES)

clean:  ## remove .venv and what runs left
	rm -rf $(VENV) runs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

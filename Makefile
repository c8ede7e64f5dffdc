# The commands of this repository. `make` or `make help` lists them.
# Everything is installed into .venv, step by step; a step is done again only when what it installs changes,
# and a set-up that was interrupted goes on where it stopped.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The Python that makes the environments (3.11 or newer).
PYTHON ?= python3
# A package index with the CPU build of PyTorch, if the usual one serves CUDA builds.
TORCH_INDEX ?=
# Further overrides for `make demo`, further options for `make test`.
ARGS ?=

VENV := .venv
MILES := .venv-miles
LAYERS := conf envs buffers hooks local cli
# Modules in C: the editable install builds them, so a change to one is a reason to install again.
NATIVE := $(shell find $(LAYERS) -name _native.c)
SOURCES := setup.py requirements tests $(wildcard benchmarks examples) $(LAYERS)

python := $(VENV)/bin/python
done := $(VENV)/.done
step := requirements/step.sh $(VENV)/setup.log
miles_python := $(MILES)/bin/python
miles_step := requirements/step.sh $(MILES)/setup.log
pip := -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt
torch_index := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help setup setup-miles setup-browser demo test check lint format types lock dist clean distclean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: setup  ## train the demo once per strategy and compare; all set-up included
	$(VENV)/bin/midstream compare job=demo $(ARGS)

test: setup setup-miles setup-browser  ## run all tests; all set-up included
	$(python) -m pytest $(ARGS)

check: lint test  ## everything that must pass before a change is handed over

lint: setup types  ## style, format and types
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)

types: setup build/types/midstream  ## types alone
	$(VENV)/bin/mypy $(LAYERS:%=-p midstream.%)

format: setup  ## mend what lint can mend by itself
	$(VENV)/bin/ruff check --fix $(SOURCES)
	$(VENV)/bin/ruff format $(SOURCES)

dist: setup  ## build a wheel into dist/
	rm -rf build/lib build/bdist*
	$(python) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

lock: setup  ## write the versions now in .venv to requirements/constraints.txt
	$(python) requirements/lock.py > requirements/constraints.new
	mv requirements/constraints.new requirements/constraints.txt

clean:  ## remove what was built and cached here, not the environments
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(LAYERS) tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf $(VENV) $(MILES)

setup: $(done)/midstream  ## install everything for the demo and the tests into .venv

$(done)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(f"midstream needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV): about 2.7 GB and a few minutes, once."
	@$(step) "[1/5] a Python environment" $(PYTHON) -m venv $(VENV)
	@mkdir -p $(done) && touch $@

$(done)/torch: requirements/torch.txt $(done)/venv
	@$(step) "[2/5] PyTorch" $(python) $(pip) $(torch_index) -r requirements/torch.txt
	@$(python) -W ignore requirements/check_torch.py
	@touch $@

$(done)/engine: requirements/engine.txt requirements/constraints.txt $(done)/torch
	@$(step) "[3/5] what SGLang needs on a CPU" $(python) $(pip) -r requirements/engine.txt
	@touch $@

$(done)/no-deps: requirements/no-deps.txt $(done)/engine
	@$(step) "[4/5] SGLang and Megatron-core" $(python) $(pip) $(torch_index) --no-deps -r requirements/no-deps.txt
	@touch $@

$(done)/midstream: pyproject.toml setup.py $(NATIVE) $(done)/no-deps
	@$(step) "[5/5] midstream, editable, with its tools" $(python) $(pip) --editable ".[local,dev]"
	@touch $@

# miles-rl brings its own megatron/ and sglang/, which would shadow the real ones: it gets an environment of its
# own, where only the host's side of the contract test runs; the engine comes from .venv.
setup-miles: $(MILES)/.done/midstream  ## install slime's fork for the contract test into .venv-miles

$(MILES)/.done/venv: $(done)/venv
	@$(miles_step) "[1/4] an environment for miles-rl" $(PYTHON) -m venv $(MILES)
	@mkdir -p $(@D) && touch $@

$(MILES)/.done/torch: requirements/torch.txt $(MILES)/.done/venv
	@$(miles_step) "[2/4] PyTorch for it" $(miles_python) $(pip) $(torch_index) -r requirements/torch.txt
	@touch $@

$(MILES)/.done/miles: requirements/miles.txt requirements/miles-no-deps.txt $(MILES)/.done/torch
	@$(miles_step) "[3/4] miles-rl" $(miles_python) $(pip) -r requirements/miles.txt
	@$(miles_step) "      without its own dependencies" $(miles_python) $(pip) --no-deps -r requirements/miles-no-deps.txt
	@touch $@

$(MILES)/.done/midstream: pyproject.toml setup.py $(NATIVE) $(MILES)/.done/miles
	@$(miles_step) "[4/4] midstream beside it, editable" $(miles_python) $(pip) --editable ".[sandbox]"
	@touch $@

# Only where it can be had without asking: as root, with apt. Without a browser one test of the report skips, and
# says so.
setup-browser:  ## install the browser in which the report is tested, where that is possible
	@if command -v chromedriver > /dev/null; then :; \
	elif [[ $$(id -u) == 0 ]] && command -v apt-get > /dev/null; then \
	  $(step) "a browser for the test of the report" requirements/browser.sh || true; \
	else echo "No chromedriver: the report is not tested in a browser. Install chromium and chromium-driver for that."; fi

# mypy does not see through the editable install's import hook; this link shows it the same names.
build/types/midstream:
	@mkdir -p $(@D) && ln -sfn ../.. $@

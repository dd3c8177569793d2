# Each target does all of its own set-up: an environment in .venv, then the thing itself.
#   make demo        three questions about a stored document, with a small model that is fetched once
#   make test        what a change needs: minutes        (ARGS=tests/test_engine.py narrows it)
#   make test-all    every test: sweeps, benchmarks and checks of figures as well
#   make lint        style, types, and words to avoid
#   make mutants     small wrong changes, and whether the tests notice (hours; goes on where it was stopped;
#                    ARGS="--count 20")
#   make aot         every program of a request through the compilers of TPUs and GPUs (1.1 GB are installed
#                    into the user's cache folder; ARGS="--target v5e --model 0.5B --json OUT" narrows it)
#   make bench       every benchmark in full, with one page of figures in bench/results: about two
#                    hours; goes on where it was stopped, and says first how many are left (ARGS=--quick:
#                    small settings; ARGS="--only ttft peers" narrows it)
#   make docs        build/docs/index.html: all pages, and the reference from the code
#   make dist        dist/: an sdist and a wheel, checked by twine
#   make bounds      a plain install of the lowest versions that pyproject.toml allows, used once
#   make release VERSION=0.2.0   shows what a release changes (APPLY=--apply does it: version, change log,
#                    artefacts, commit, tag; nothing is pushed)
#   make clean       remove .venv and build/
# PYTHON=/path/to/python3.12 picks the interpreter (3.11 or newer); otherwise the first that works is taken.

SHELL := /bin/bash
VENV := .venv
CANDIDATES := python3 python3.13 python3.12 python3.11 python \
  $(wildcard $(HOME)/.pyenv/versions/3.1[1-9]*/bin/python)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
  if "$$p" -c '$(USABLE)' >/dev/null 2>&1; then command -v "$$p"; break; fi; done)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
# Compiled now, where there is a C++ compiler, so that the first request need not wait for it.
NATIVE := $(VENV)/bin/python -c 'from ckv_jax.kernels_pallas.native.library import native; native()'
TORCH := torch==2.13.0
FETCHED := $(VENV)/bin/python -c 'from ckv_jax.data.smollm2 import *; \
  exit(not (cache_folder() / "models" / FILE).exists())'
OR_STOP := || { echo "pip failed, for the reason above; it needs the network" >&2; exit 1; }
OLD_PROGRAMS = mkdir -p "$$CKV_TESTS_COMPILED" && find "$$CKV_TESTS_COMPILED" -type f -mtime +14 -delete || true
LOCK := $(if $(CI),-c .ci/constraints.txt)

.PHONY: demo test test-all lint types mutants aot bench docs dist bounds release clean

demo: $(VENV)/.installed
	@$(VENV)/bin/ckv demo $(ARGS)
	@if $(FETCHED); then echo 'Next: . $(VENV)/bin/activate &&' \
	  'python -m ckv_jax.data.handbook > handbook.txt &&' \
	  'ckv chat $$(python -m ckv_jax.data.smollm2) handbook.txt --store /tmp/chat' >&2; fi

# Both workers and every process that tests start would compile the same sources otherwise.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# XLA's programs of one run serve the next; those of two weeks ago go.
test test-all: export CKV_TESTS_COMPILED ?= $(CURDIR)/build/compiled
test: $(VENV)/.tested
	@$(OLD_PROGRAMS)
	@$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.tested
	@$(OLD_PROGRAMS)
	@$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.tested types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/test_words.py

# mypy does not follow setuptools' package-dir, so it is shown the tree as it is installed.
types: $(VENV)/.tested
	@rm -rf build/types && mkdir -p build/types/ckv_jax
	@ln -s $(CURDIR)/ckv_jax/* $(CURDIR)/storage $(CURDIR)/kernels_pallas build/types/ckv_jax/
	cd build/types && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml -p ckv_jax

mutants: $(VENV)/.mutable
	$(VENV)/bin/python -m tests.mutants --resume --json bench/results/mutants.json $(ARGS)

aot: $(VENV)/.tested
	-@$(VENV)/bin/python -m bench.aot.compilers
	@$(VENV)/bin/python -m bench.aot $(ARGS)

bench: $(VENV)/.tested
	@$(VENV)/bin/python -m bench.report --resume --out bench/results $(ARGS)

docs: $(VENV)/.documented
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict -f docs/mkdocs.yml
	@echo "open build/docs/index.html"

dist: $(VENV)/.releasing
	@rm -rf dist
	@$(VENV)/bin/python -m build --outdir dist . >/dev/null
	@$(VENV)/bin/python -m twine check --strict dist/*

bounds: | $(VENV)/bin/python
	@rm -rf build/lowest && mkdir -p build && "$(PYTHON)" -m venv build/lowest
	@"$(PYTHON)" .ci/bounds.py > build/lowest/constraints.txt
	@build/lowest/bin/python -m pip --disable-pip-version-check --no-input install -qq -c build/lowest/constraints.txt $(or $(FROM),.)
	@cp .ci/smoke.py build/lowest/ && cd build/lowest && bin/python smoke.py && bin/ckv ask --help >/dev/null

release:
	@"$(PYTHON)" .ci/release.py $(VERSION) $(APPLY)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv and pip was found." \
	  "Install one (Debian, Ubuntu: apt-get install python3-venv) or say PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c '$(USABLE)' || { echo "$(PYTHON) is older than 3.11 or has no venv module" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing ckv-jax and what it needs into $(VENV) (minutes, the first time)"
	@$(PIP) install -qq $(LOCK) -e . $(OR_STOP)
	-@$(NATIVE)
	@touch $@

$(VENV)/.tested: pyproject.toml | $(VENV)/bin/python
	@echo "installing ckv-jax with its test tools into $(VENV) (minutes, the first time)"
	@$(PIP) install -qq $(LOCK) -e '.[test]' $(TORCH) $(OR_STOP)
	-@$(NATIVE)
	@touch $(VENV)/.installed $@

$(VENV)/.mutable: $(VENV)/.tested
	@$(PIP) install -qq $(LOCK) -e '.[test,mutants]' $(TORCH) $(OR_STOP)
	@touch $(VENV)/.installed $@

$(VENV)/.releasing: pyproject.toml | $(VENV)/bin/python
	@$(PIP) install -qq $(LOCK) 'build>=1.2' 'twine>=6.1' $(OR_STOP)
	@touch $@

$(VENV)/.documented: pyproject.toml | $(VENV)/bin/python
	@$(PIP) install -qq $(LOCK) -e '.[docs]' $(OR_STOP)
	@touch $(VENV)/.installed $@

# Every target sets up what it needs in .venv by itself, from a bare Python 3.10 or newer:
#
#   make demo    make test    make PYTHON=python3.12 test    make PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" test
#
# The second run finds .venv/.ready newer than everything it was made from, and installs nothing.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
HOSTS ?= vllm sglang
WORKERS ?= auto
REPORT ?= docs/reference/evidence/gpu.md
SHARD ?=
DRIFT ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet # errors only
PINNED := -c constraints.txt $(PIP_ARGS)

# Tools that no distribution of this workspace asks for itself. hatchling and editables build the core inside .venv, so that they are pinned too;
# tomli is what Python 3.10 reads TOML with, and mypy looks at that branch on every version.
# Triton comes with torch's CUDA builds; beside the CPU build it interprets the kernels, and compiles them, without a GPU.
BUILD := hatchling editables
TOOLS := argcomplete build coverage mkdocs mkdocs-material 'mkdocstrings[python]' mypy pytest-randomly pytest-xdist \
         ruff tomli \
         'triton; sys_platform == "linux" and platform_machine == "x86_64"'

# Every distribution, as a user would have them: core, kit, and the hosts and plugins that admit this Python.
WORKSPACE := -e 'core[torch]' -e kit $$($(BIN)/python tools/workspace.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-ci test-all test-transformers test-triton test-pure test-hosts test-oldest release-check wheels lint docs bench test-gpu clean tables drift

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(READY): Makefile constraints.txt $(wildcard */pyproject.toml */*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "attnplug needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	       "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(PINNED) $(BUILD)
	@$(PIP) install $(PINNED) --no-build-isolation $(WORKSPACE) $(TOOLS)
	@touch $@

demo: $(READY) ## real model architectures, served through the chosen backend
	@$(BIN)/attnplug demo

# Three tiers of tests (CONTRIBUTING): those of `make test`; those marked slow too, in CI; those marked exhaustive too, in
# `make test-all`. Files go to one process per core, long ones first, each with one thread of torch's: more would wait for
# each other. Hundreds of processes are started: they keep what they compile of this project, wherever the environment
# says otherwise. coverage starts pytest, and not the other way round: the kit's pytest plugin is imported before any
# plugin could measure it.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python $(1) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(READY) ## lint, docs, and the fast tests: a few minutes
	@$(MAKE) --no-print-directory -j2 lint docs # each is one process
	@$(call PYTEST) -m 'not slow and not exhaustive' $(PYTEST_ARGS)

# Coverage is of core and the kit: conftest.py leaves out the tests of hosts and plugins, which tracing would make slower.
test-ci: $(READY) ## what CI runs but for the hosts' engines: `make test` with coverage, and the tests marked slow, in one session
	@$(MAKE) --no-print-directory -j2 lint docs
	@$(BIN)/python -m coverage erase
	@$(call PYTEST,-m coverage run) -m 'not exhaustive' $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

# Random, with ten times the examples, and coverage of every distribution. SHARD=2/3 runs a third of the files, and nothing else.
COMMA := ,
OTHER_PACKAGES = $(subst $() ,$(COMMA),$(patsubst %,attnplug_%,$(filter-out sglang vllm,$(notdir $(wildcard hosts/* plugins/*)))))
test-all: export EXAMPLES_SCALE = 10
test-all: export EXHAUSTIVE = 1
test-all: $(READY) ## every test, hosts and other versions too: hours, or SHARD=1/3, SHARD=2/3, ... test-transformers test-triton test-pure test-hosts
	@$(BIN)/python -m coverage erase
	@$(call PYTEST,-m coverage run --source=$(OTHER_PACKAGES)) $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(if $(SHARD),,$(BIN)/python -m coverage report)
	@$(if $(SHARD),,$(MAKE) --no-print-directory test-transformers test-triton test-pure test-hosts)

test-transformers: $(READY) ## continuous batching of hosts/transformers beside older releases of transformers
	@PIP_ARGS='$(PIP_ARGS)' tools/test-transformers.sh

test-pure: ## the parts of core that need no torch, on the oldest and the newest Python
	@PIP_ARGS='$(PIP_ARGS)' tools/test-pure.sh

test-triton: $(READY) ## the kernels of plugins/triton, compiled by the oldest and the newest Triton
	@PIP_ARGS='$(PIP_ARGS)' WORKERS='$(WORKERS)' tools/test-triton.sh

# Environments apart, 7 GB, in HOSTS_CACHE or below .venv-hosts: the engines pin what .venv has in other versions. They need
# Python 3.11, and the CPU build of torch.
test-hosts: ## hosts/vllm and hosts/sglang beside their engines: whole ones on the CPU, and the Python code of three versions
	@HOSTS='$(HOSTS)' PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' tools/test-hosts.sh $(PYTEST_ARGS)

# Several GB: torch 2.6 is on the index as a CUDA build only. Run it before a release.
test-oldest: ## core and the kit with the oldest torch and the oldest dependencies that they admit
	@PIP_ARGS='$(PIP_ARGS)' tools/test-oldest.sh

# Minutes, and 1 GB below build/: every distribution in an environment apart. Run it before a release; neither `make test` nor CI does.
release-check: $(READY) ## build every wheel and sdist, check them, install each alone, run its smoke test
	@PIP_ARGS='$(PIP_ARGS)' $(BIN)/python -m tools.release

wheels: $(READY) ## a wheel of every distribution in build/wheels, with a page of links for pip install --find-links
	@$(BIN)/python -m tools.release wheels

lint: $(READY) ## ruff, ruff format, mypy strict, words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.words

# The banner that mkdocs-material prints about the future of MkDocs is not about this documentation.
docs: $(READY) ## the documentation, into site/; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tables: $(READY) ## regenerate the reference pages that are made from manifests
	@$(BIN)/python -m tools.tables --write

# Minutes to an hour, and several GB below build/: newer releases in environments apart. DRIFT='triton torch==2.15.*' names some.
drift: $(READY) ## the newest releases of hosts and libraries: their tests, and a table in docs/reference/compatibility.md
	@$(BIN)/python -m tools.drift $(DRIFT); status=$$?; $(BIN)/python -m tools.tables --write; exit $$status

bench: $(READY) ## the time budgets, measured here
	@$(BIN)/attnplug bench

# Tests of a plugin on the GPU need its kernel library in .venv too: .venv/bin/pip install 'flashinfer-python>=0.6.8,<0.7.3' 'flash-attn-4>=4.0.0b11,<4.1'
test-gpu: $(READY) ## the tests of core and plugins that need an NVIDIA GPU; writes a report under docs/reference/evidence
	@$(BIN)/python -m pytest -m gpu --gpu-report=$(REPORT) $(PYTEST_ARGS)

clean: ## everything that the other targets made
	rm -rf $(VENV) .venv-hosts build site .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis

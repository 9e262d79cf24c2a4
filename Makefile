# Segue. `make help` lists the targets. The first run needs a network, later ones do not.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
ATTACK_ARGS ?= --seconds 120
TP ?= 1

# The tests start hundreds of processes: without its bytecode, each would compile Segue again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VENV_STAMP := $(VENV)/.stamp-venv
INSTALL_STAMP := $(VENV)/.stamp-install
DOCS_STAMP := $(VENV)/.stamp-docs
BYTECODE_STAMP := $(VENV)/.stamp-bytecode
CLIENTS := .clients

named_tp = $(if $(filter-out 1,$(TP)),_tp$(TP))
shapes = $$($(BIN)/python -c 'from bench.suite import model_dir; print(model_dir("$(1)"))')

.DEFAULT_GOAL := setup
.PHONY: setup model demo test lint types imports bytecode pytest together alone soak attack bench screenshot docs clients gpu-test gpu-bench gpu-sync-bench clean help

setup: $(INSTALL_STAMP) ## create .venv with Segue, its dependencies and the development tools

$(VENV_STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' not found; install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; \
	  sys.exit(0 if sys.version_info >= (3, 11) else "make: $(PYTHON) is Python " + v + ", Segue needs 3.11 or newer; say make PYTHON=/path/to/python")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# One command, so that the pinned torch is the one the dependencies are resolved with.
$(INSTALL_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt $(PIP_ARGS) setuptools torch
	$(PIP) install -c constraints.txt $(PIP_ARGS) --no-build-isolation -e '.[dev]'
	@touch $@

model: $(INSTALL_STAMP) # fetches and unpacks the bundled model once; later runs find it in the user's cache
	@$(BIN)/python -m segue.checkpoint.bundled

demo: model ## serve the bundled model, ask it a question, show the answer and the speed
	@$(BIN)/python examples/demo/demo.py

# Types and bytecode take half a minute of one core each.
test: ## lint, types, import contracts and all tests
	@$(MAKE) --no-print-directory -j 2 lint types imports bytecode
	@$(MAKE) --no-print-directory together
	@$(MAKE) --no-print-directory alone

lint: $(INSTALL_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALL_STAMP)
	$(BIN)/mypy --strict src

imports: $(INSTALL_STAMP)
	$(BIN)/lint-imports --no-logo

# Each process of `together` imports all tests; compiled once, that takes it 10 s instead of 20.
bytecode: $(BYTECODE_STAMP)

$(BYTECODE_STAMP): $(INSTALL_STAMP) $(shell find src tests bench -name '*.py' 2>/dev/null)
	@$(BIN)/python -m pytest -qq --collect-only >/dev/null || true # the tests themselves tell of an error
	@touch $@

pytest: together
	@$(MAKE) --no-print-directory alone

# Three files at a time: two leave a quarter of two cores idle, while tests wait for processes and deadlines.
# They come in the order of tests/conftest.py, and not those with the most tests first, which are not the longest.
together: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not alone" $(PYTEST_ARGS)

# What measures times that load would spoil. Only its files are given to pytest, which takes 10 s to collect all tests.
alone: model
	$(BIN)/python -m pytest -m "alone and not slow and not gpu" $(PYTEST_ARGS) $$(grep -rl "mark[.]alone" --include="test_*.py" --exclude-dir=gpu tests)

soak: model $(DOCS_STAMP) ## the slow tests: long scheduler properties, five minutes of anything over HTTP, servers killed under load, the reference fixture made again, the wheel in bare environments
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

# Each list of pins in tests/clients is an environment: requirements-NAME.txt is installed with its dependencies, and
# no-deps-NAME.txt holds all that its environment needs. What an environment lacks, torch above all, it finds in .venv.
client_names = $(patsubst tests/clients/$(1)-%.txt,%,$(wildcard tests/clients/$(1)-*.txt))
client_python = $(CLIENTS)/$*/bin/python

define client_install
	$(BIN)/python -m venv --clear --without-pip $(CLIENTS)/$*
	echo 'import site; site.addsitedir("'"$$($(abspath $(BIN))/python -c 'import site; print(site.getsitepackages()[0])')"'")' \
	  >"$$($(client_python) -c 'import site; print(site.getsitepackages()[0])')/segue.pth"
	grep '^torch==' constraints.txt >$(CLIENTS)/$*/constraints.txt
	$(PIP) --python $(client_python) install $(1) -c $(CLIENTS)/$*/constraints.txt $(PIP_ARGS) -r $<
	@touch $@
endef

clients: $(addprefix $(CLIENTS)/stamp-,$(call client_names,requirements) $(call client_names,no-deps)) ## other projects' clients, routers and trainers, in environments of their own; make soak tests Segue with those that are there

$(CLIENTS)/stamp-%: tests/clients/requirements-%.txt $(INSTALL_STAMP)
	$(call client_install)

$(CLIENTS)/stamp-%: tests/clients/no-deps-%.txt $(INSTALL_STAMP)
	$(call client_install,--no-deps)

attack: model ## two minutes of attacks on a server that it starts; ATTACK_ARGS="URL --seconds 600" on one that runs here
	$(BIN)/python -m tests.attack $(ATTACK_ARGS)

bench: model ## the CPU benchmarks; results go to bench/results
	$(BIN)/python -m bench.cpu_vs_transformers
	$(BIN)/python -m bench.serving_cost
	$(BIN)/python -m bench.load_time
	$(BIN)/python -m bench.start_time
	$(BIN)/python -m bench.host_cost
	$(BIN)/python -m bench.host_per_token
	$(BIN)/python -m bench.guided
	$(BIN)/python -m bench.tools

screenshot: model ## the README's picture of the web page, docs/images/page.png; needs Chromium
	$(BIN)/python -m scripts.screenshot

$(DOCS_STAMP): $(INSTALL_STAMP)
	$(PIP) install -c constraints.txt $(PIP_ARGS) --no-build-isolation -e '.[docs]'
	@touch $@

# Once its packages are installed, it needs no network, and readers of the site never do. The variable switches off
# an advertisement.
docs: $(DOCS_STAMP) ## the documentation as a site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

gpu-test: $(INSTALL_STAMP) ## the tests that need a CUDA device, perhaps only GPU_TESTS="some files"; AT_ONCE=5: so many files at a time; PYTEST_ARGS="-m gpu": the slow ones too
	$(BIN)/python -m bench.gpu_tests $(GPU_TESTS) --at-once=$(or $(AT_ONCE),1) --pytest-args='$(PYTEST_ARGS)'

gpu-bench: $(INSTALL_STAMP) ## the benchmarks of one GPU, or with GPUS=2 of two; perhaps with THEIRS="another server"
	$(BIN)/python -m bench.gpu_bench --gpus=$(or $(GPUS),1) $(if $(THEIRS),--theirs "$(THEIRS)")

gpu-sync-bench: $(INSTALL_STAMP) ## weight updates between two GPUs, staged on the device and on the host; with TP=2 three
	$(BIN)/python -m bench.weight_sync $(call shapes,8b) --device cuda --tp=$(TP) --weight-staging-gb=18 --name gpu_weight_sync$(named_tp); missed=$$?; \
	$(BIN)/python -m bench.weight_sync $(call shapes,8b) --device cuda --tp=$(TP) --name gpu_weight_sync_host$(named_tp) && exit $$missed

clean: ## remove .venv and every cache in this directory (not the models in your user cache)
	rm -rf $(VENV) $(CLIENTS) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Both `make demo` and `make test` set themselves up; they need Python 3.11 or newer and a package index.
PYTHON ?= python3
PYTEST_WORKERS ?= 2
BIN := .venv/bin
SITE := build/site
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check format wheel test-gpu site clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/.stamp-run ## Find a planted culprit head in a small bundled checkpoint
	$(BIN)/bf16forensics demo

# OMP_NUM_THREADS: the workers already fill the cores.
test: check ## Run every check and every test
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(PYTEST_WORKERS)

check: .venv/.stamp-dev site ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(SITE) && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p bf16forensics

format: .venv/.stamp-dev ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: .venv/.stamp-dev ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

# Nothing is installed: for a machine without network whose own Python has torch, triton and pytest.
# -P keeps the root off sys.path, where ./kernels would shadow the installed package of that name.
# GPU_WORKERS=12: kernels compile side by side, where pytest-xdist is installed (pytest-benchmark warns beside it).
test-gpu: site ## Run the tests that need a GPU on this machine, with $(PYTHON)
	PYTHONPATH=$(SITE) $(PYTHON) -P -m pytest -m gpu $(if $(GPU_WORKERS),-n $(GPU_WORKERS) -p no:benchmark) tests/kernels tests/emulate tests/attention tests/capture/test_capture_gpu.py

# The package as it is laid out when installed: mypy cannot follow the editable install's mapping of `kernels`.
site:
	@rm -rf $(SITE)
	@mkdir -p $(SITE)
	@cp -pR bf16forensics $(SITE)/bf16forensics
	@cp -pR kernels $(SITE)/bf16forensics/kernels

clean: ## Remove everything that make created
	rm -rf .venv build dist bf16forensics.egg-info .ruff_cache .mypy_cache .pytest_cache

.venv/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@touch $@

# torch first and alone, so that the pin decides which build is taken before anything else asks for it.
.venv/.stamp-run: .venv/.stamp-venv pyproject.toml constraints.txt
	@echo "Setting up .venv (once; torch is a large download)"
	$(INSTALL) torch
	$(INSTALL) --editable '.[plot]'
	@touch $@

.venv/.stamp-dev: .venv/.stamp-run
	$(INSTALL) --editable '.[gpu,test,dev]'
	@touch $@

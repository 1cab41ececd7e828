# Two commands for everybody: `make serve` and `make test`. Everything lives in .venv, which is made on first use.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
# What a change of makes an environment stale: its own requirements, and nothing else.
STAMP_SERVE := $(VENV)/.installed-serve
STAMP_TEST  := $(VENV)/.installed-test
# Quiet unless somebody watches. What is imported is compiled then; compiling all of torch first takes half a minute.
PIP_INSTALL = quiet=-qq; [ -t 1 ] && quiet=; \
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $$quiet

.PHONY: help serve test check-cuda coverage lint bench chaos clean

help:
	@echo "make serve [ARGS='MODEL --port 8000 ...']  install, fetch the default model, serve it over HTTP"
	@echo "make test                                  everything that has to hold before a change lands"
	@echo "make lint                                  the part of it that runs no code: style, types, imports, sizes"
	@echo "make check-cuda                            compile FlashInfer for Hopper and run its planner, without a GPU"
	@echo "make coverage                              which lines the tests of single parts reach; takes longer"
	@echo "make bench [ARGS='--concurrency 1,8,32']   start a server and measure it"
	@echo "make chaos [ARGS='--kills 5 --stage gpu']  kill every process under load, many times, and check every answer"
	@echo "make clean                                 remove .venv and caches"

serve: $(STAMP_SERVE)
	@exec $(BIN)/stepahead serve $(ARGS)

bench: $(STAMP_SERVE)
	@exec $(BIN)/python -m tools.bench_serve --start $(ARGS)

chaos: $(STAMP_SERVE)
	@exec $(BIN)/python -m tools.chaos $(ARGS)

lint: $(STAMP_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.size_ratchet

test: lint
	$(BIN)/python -m pytest --ignore=tests/e2e --ignore=tests/interpret -n 2 --dist loadfile $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpret -n 2 --dist loadfile $(ARGS)
	$(BIN)/python -m pytest tests/e2e -n 2 --dist loadfile $(ARGS)

check-cuda: $(STAMP_TEST)
	$(BIN)/python -m tools.check_cuda

coverage: $(STAMP_TEST)
	$(BIN)/coverage erase
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
	  $(BIN)/coverage run -m pytest --ignore=tests/e2e --ignore=tests/interpret -n 2 --dist loadfile $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "StepAhead needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMP_SERVE): pyproject.toml | $(BIN)/python
	@echo "installing the requirements into $(VENV) (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(STAMP_TEST): pyproject.toml | $(BIN)/python
	@echo "installing the requirements and the tools for testing into $(VENV) (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(STAMP_SERVE)

clean:
	rm -rf $(VENV) build *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	       .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` is the place to start. Every target sets up what it needs.
#
# Needs: Python 3.11 or later, a C compiler (for the Redis that the tests start), and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
MINISWE_VENV ?= .venv-miniswe

.DEFAULT_GOAL := help
.PHONY: help install demo lint test e2e bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## the package and its tools into .venv, changed sources take effect at once

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, this is {sys.version}")'
	@echo "installing into $(VENV): half a minute the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install -q -e '.[dev]'
	@touch $@

demo: $(STAMP) ## one agent, directly and through the proxy, on a simulated engine: seconds, no GPU
	@$(BIN)/tokencache demo $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/mypy

test: lint ## lint, then all tests but the end-to-end ones
	$(BIN)/pytest

e2e: $(STAMP) ## a real vLLM on CPU and a real harness: minutes and 4 GB the first time
	PYTHON=$(PYTHON) tests/e2e/rig/install_vllm.sh $(VLLM_VENV)
	PYTHON=$(PYTHON) tests/e2e/rig/install_miniswe.sh $(MINISWE_VENV)
	TOKENCACHE_E2E_VLLM=$(abspath $(VLLM_VENV)) TOKENCACHE_E2E_MINISWE=$(abspath $(MINISWE_VENV)) \
		$(BIN)/pytest tests/e2e -o addopts="-q --strict-markers --strict-config"

bench: $(STAMP) ## what the proxy costs
	$(BIN)/python -m bench $(ARGS)

clean: ## remove .venv, caches and builds (.venv-vllm and .venv-miniswe stay: gigabytes)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist bench/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

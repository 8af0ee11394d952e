# kvgate: everything a person runs. Each target makes what it needs; nothing is assumed but Python 3.11+, git and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BACKENDS ?=
HOST   ?= 127.0.0.1
PORT   ?= 8080
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | column -t -s '|'

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@echo "kvgate: making the Python environment in $(VENV) (about a minute the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvgate needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
	@echo "kvgate: environment ready."

setup: $(VENV)/.ready ## make the Python environment in .venv

run: setup ## two simulated vLLM backends and the gateway in front (BACKENDS="http://host:8000 ..." for real ones)
	@$(BIN)/kvgate demo --host $(HOST) --port $(PORT) $(foreach b,$(BACKENDS),--backend $(b)) $(ARGS)

test: setup lint ## lint, types and every test that needs no vLLM
	@echo "kvgate: running the tests ..."
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: setup ## resolve requirements/*.txt anew from pyproject.toml
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile --quiet --universal --no-header --python-version 3.11 --upgrade pyproject.toml -o requirements/serve.txt
	@$(BIN)/uv pip compile --quiet --universal --no-header --python-version 3.11 --extra dev pyproject.toml -c requirements/serve.txt -o requirements/dev.txt

clean: ## remove the environment and everything made
	rm -rf $(VENV) .venv-vllm .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

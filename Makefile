# Every target does the set-up that it needs. `make` alone lists them.
VENV ?= .venv
DSPARK = $(VENV)/bin/dspark
PYTHON_IN = $(VENV)/bin/python
PAIR ?= smollm2-135m
SLOW ?=
EXTRAS ?= dev

.PHONY: help demo race test pair sglang sglang-test bench gpu-check tables picture clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: ## open the page: plain decoding and DSpark race on the default pair
	@VENV=$(VENV) scripts/setup.sh ui
	@$(DSPARK) models pull $(PAIR)
	@$(DSPARK) demo --pair $(PAIR) $(ARGS)

race: pair ## the same race in the terminal
	@$(DSPARK) race --pair $(PAIR) --limit 6 --max-new-tokens 96 $(ARGS)

test: ## format, lint, types and tests; SLOW=1 adds the slow tests
	@VENV=$(VENV) scripts/setup.sh $(EXTRAS)
	@$(DSPARK) models pull $(PAIR)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTHON_IN) -m pytest $(if $(SLOW),,-m "not slow") $(ARGS)

pair:
	@VENV=$(VENV) scripts/setup.sh
	@$(DSPARK) models pull $(PAIR)

sglang: ## a CPU-only SGLang with this plugin, in .venv-sglang
	@scripts/setup_sglang.sh

sglang-test: sglang ## tests of the SGLang backend; SLOW=1 starts real servers
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests/sglang_dspark/serving $(if $(SLOW),,-m "not slow") $(ARGS)

bench: pair ## measure step costs, draft cost, overhead and the race; writes results/
	@$(PYTHON_IN) -m local_runner.bench $(ARGS)

# Where the system's Python has what it needs, that is used: it may be the only one that knows the device.
gpu-check: ## everything that needs a CUDA device, as one script; results as JSON
	@if python3 -c 'import torch, transformers, psutil, rich' 2>/dev/null; then python3 -m local_runner.gpu_check $(ARGS); \
	else VENV=$(VENV) scripts/setup.sh && $(PYTHON_IN) -m local_runner.gpu_check $(ARGS); fi

tables: ## rewrite the README's tables from stored results
	@VENV=$(VENV) scripts/setup.sh
	@$(PYTHON_IN) -m local_runner.report README.md
	@$(PYTHON_IN) -m local_runner.plan_command --store results/plans

picture: pair ## race the default pair and rewrite the README's pictures of it; needs Chromium
	@VENV=$(VENV) scripts/setup.sh dev
	@$(PYTHON_IN) -m ui.picture --out docs

clean: ## remove the environment and caches of tools
	rm -rf $(VENV) .venv-sglang .mypy_cache .pytest_cache .ruff_cache .hypothesis

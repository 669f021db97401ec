# make run: serve the demo model.  make test: all tests and checks.  `make` alone lists the rest.
# Nothing is installed outside $(VENV) and models/, but what is compiled of asyncserve/token_path, beside its
# sources, and Debian's chromium by tests that root runs where there is none; a second run skips what is done.

PYTHON ?= python3
VENV ?= .venv
# Another package index for torch alone, such as one that serves a CPU-only build. See README.
TORCH_INDEX ?=
DEMO := models/SmolLM2-135M-Instruct.Q4_1.gguf
# A model with a sliding window, under the Gemma terms of use: make run MODEL=models/gemma-3-270m-q4_k_m.gguf
GEMMA := models/gemma-3-270m-q4_k_m.gguf
MODEL ?= $(DEMO)
NAME ?= $(patsubst %.gguf,%,$(notdir $(MODEL)))
PORT ?= 8000
# Further options of the server, as on its command line.
ARGS ?=
# Further options of the load test, as on its command line.
LOAD_ARGS ?=
URL ?= http://127.0.0.1:$(PORT)
SCENARIO ?= smoke
# Further options of monitoring.prometheus, as on its command line.
MONITOR_ARGS ?=
# Further options of pytest. Coverage is measured, and must suffice, when all tests run: without any.
PYTEST_ARGS ?=
# Processes that share all tests; tests named by PYTEST_ARGS run in one.
WORKERS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore
PIP := $(VENV)/bin/python -m pip install

.PHONY: help run model test check lint test-gpu load monitor wheel clean

help:
	@echo 'make run       serve $(MODEL) on port $(PORT)  (MODEL=, PORT=, ARGS="--max-num-seqs 8")'
	@echo 'make test      format, lint, types and all tests that need no GPU, with their coverage'
	@echo 'make check     format, lint, types, architecture'
	@echo 'make test-gpu  the tests that need a GPU'
	@echo 'make monitor   Prometheus on port 9090, scraping $(URL)  (URL=, API_KEY in the environment)'
	@echo 'make load      load test of $(URL)  (URL=, SCENARIO=$(SCENARIO), LOAD_ARGS=, see loadtest/scenarios)'
	@echo 'make model     fetch $(MODEL)    make wheel  build dist/*.whl    make clean  remove $(VENV)'

run: $(VENV)/.run $(filter $(DEMO) $(GEMMA),$(MODEL))
	@exec $(VENV)/bin/asyncserve --model $(MODEL) --served-model-name $(NAME) --port $(PORT) $(ARGS)

model: $(filter $(DEMO) $(GEMMA),$(MODEL))

test: lint $(DEMO)
ifeq ($(PYTEST_ARGS),)
	$(VENV)/bin/python -m pytest -m 'not gpu' -n $(WORKERS) --dist worksteal \
	    --cov --cov-report=term-missing:skip-covered
else
	$(VENV)/bin/python -m pytest -m 'not gpu' $(PYTEST_ARGS)
endif

check: lint
	$(VENV)/bin/python -m pytest -q tests/architecture

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test-gpu: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m gpu $(PYTEST_ARGS)

monitor: $(VENV)/.run
	@exec $(VENV)/bin/python -m monitoring.prometheus --url $(URL) $(MONITOR_ARGS)

load: $(VENV)/.test
	$(VENV)/bin/python -m loadtest --url $(URL) --scenario $(SCENARIO) --results loadtest/results/load.jsonl \
	    --label "$$(git rev-parse --short HEAD 2>/dev/null)" $(LOAD_ARGS)

# What an earlier one left in build/ would go into it.
wheel: $(VENV)/.run
	rm -rf build
	$(VENV)/bin/python -m pip wheel . --no-deps --wheel-dir dist

clean:
	rm -rf $(VENV)

# What fetches it needs a package of the server's.
$(DEMO) $(GEMMA): | $(VENV)/.run
	$(VENV)/bin/python scripts/fetch_model.py $@

# Debian splits the module that puts pip into a new environment off into python3-venv; where it is missing, the
# system's own pip puts a pip there.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'asyncserve needs Python 3.11 or later: make PYTHON=/path/to/python3.11 …' >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -c 'import pip, venv' 2>/dev/null; then \
	    $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install pip; \
	else echo 'Python can make no virtual environment: apt-get install python3-venv' >&2; exit 1; fi
	@touch $@

# torch first and alone: it may come from an index of its own, and what follows must not replace its build.
$(VENV)/.torch: requirements.txt | $(VENV)/.made
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' requirements.txt)
	@touch $@

# Where the C cannot be compiled, pip says nothing and the same in Python is used.
$(VENV)/.run: requirements.txt pyproject.toml setup.py $(wildcard asyncserve/token_path/*.[ch]) $(VENV)/.torch
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@$(VENV)/bin/python -c 'import asyncserve.token_path.native' 2>/dev/null || \
	    echo 'No C compiler, or no headers of Python: streamed tokens will take more of the CPU. See README.' >&2
	@touch $@

$(VENV)/.test: requirements-test.txt $(VENV)/.run
	$(PIP) -r requirements-test.txt
	@touch $@

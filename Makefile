# PYTHON=python3.12 picks the interpreter that .venv is made from.
# JOBS=8 runs the tests in eight processes beside each other instead of three.
# PY=python3 runs everything in an environment of your own and makes no .venv.

PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
# test processes beside each other, each of one thread (tests/conftest.py); on two cores the third
# works while another waits for a process of its own
JOBS ?= 3

# tests that only compute compile kernels beside each other; those that read the card's memory run
# by themselves
GPU_JOBS ?= 8
GPU_SHARED := tests/kernels tests/patches
GPU_ALONE := tests/accel

TORCH := torch==2.13.0
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

ifeq ($(PY),$(VENV)/bin/python)
SDX := $(VENV)/bin/sdx-accel
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
# an interpreter that went away takes what it installed with it
$(shell test -x $(PY) || rm -f $(VENV)/.torch $(BASE) $(DEV))
else
SDX := $(PY) -m sdx_accel
# an environment of the user's own need not have the project installed
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/patches:$(PYTHONPATH)
endif

.PHONY: help demo test test-all gpu gpu-all bench docs lint .venv

help:
	@echo "make demo      set up .venv and draw a red apple, on the GPU or the CPU"
	@echo "make test      set up .venv and run every check that needs no GPU"
	@echo "make test-all  the same with the slow tests"
	@echo "make gpu       a short set of tests and figures on an NVIDIA GPU"
	@echo "make gpu-all   every test that needs an NVIDIA GPU"
	@echo "make bench     every kernel's micro-benchmark"
	@echo "make docs      rewrite docs/cli.md and check every link"

demo: $(BASE)
	$(SDX) generate "a red apple"

# the wheel is built, installed in a clean environment and run by tests/packaging/test_wheel.py
test: lint
	$(PY) -m pytest -n $(JOBS) --dist loadfile

test-all: lint
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not gpu"

lint: $(DEV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# the benchmark writes its JSON into $$OUT when that is set
gpu: $(DEV)
	@$(PY) -c 'import sys, torch; found = torch.cuda.is_available(); \
	  found or print("make gpu needs an NVIDIA GPU, and torch", torch.__version__, "sees none: run", \
	  "$(SDX) doctor"); sys.exit(0 if found else 2)'
	$(PY) -m pytest -m "gpu and not slow" -n auto --maxprocesses $(GPU_JOBS) $(GPU_SHARED)
	$(PY) -m pytest -m "gpu and not slow" $(GPU_ALONE)
	$(PY) -m sdx_accel.bench.gpu --pictures 2
	$(PY) -m sdx_accel.bench.steps --vram 8,7,6.8 --rounds 2 --steps 8

gpu-all: $(DEV)
	$(PY) -m pytest -m gpu -n auto --maxprocesses $(GPU_JOBS) $(GPU_SHARED)
	$(PY) -m pytest -m gpu $(GPU_ALONE) tests/notebooks

bench: $(DEV)
	for file in kernels/bench/bench_*.py; do $(PY) "$$file" || exit 1; done

docs: $(DEV)
	$(PY) -m typer sdx_accel.cli.app utils docs --name sdx-accel --output docs/cli.md
	$(PY) -m pytest tests/packaging/test_docs.py

.venv: $(DEV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "sdx_accel needs Python 3.11 or newer, and '$(PYTHON)' is not."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing."; \
	  echo "On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch is asked for by itself and exactly: it is the large one, and which build comes (CUDA on
# Linux, Metal on macOS) is decided there. Where an earlier try was cut short, pip is put back.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@$(PIP) --version >/dev/null 2>&1 || $(VENV)/bin/python -m ensurepip
	@echo "Setting up $(VENV). With CUDA, torch is a download of about 3 GB, once."
	$(PIP) install --quiet -c constraints.txt $(TORCH)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.installed

# make train | test | lint | setup — everything runs in .venv, which the first call makes.
# make cluster-up | cluster-down — a Slurm of four nodes on this machine, installed if need be; needs root and no .venv.
PYTHON ?= python3
CONFIG ?= configs/cpu.yaml
BIN := .venv/bin

# A worker that is lost is not replaced: xdist gives its replacement nothing to do and waits for it for ever.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0

.PHONY: train test lint format setup cluster-up cluster-down
train: setup
	$(BIN)/python -m src.cli fit --config $(CONFIG)

test: setup
	$(PYTEST)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

cluster-up:
	@$(PYTHON) slurm/local_cluster.py up --install

cluster-down:
	@$(PYTHON) slurm/local_cluster.py down

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[slurm,vision,dev]'
	touch $@

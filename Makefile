# make train | test | lint | setup — everything runs in .venv, which the first call makes.
# make test-cluster — the tests on a real Slurm of four nodes, which it starts and stops; needs root.
# make cluster-up | cluster-down — a Slurm of four nodes on this machine, installed if need be; needs root and no .venv.
PYTHON ?= python3
CONFIG ?= configs/cpu.yaml
BIN := .venv/bin

.PHONY: train test test-cluster lint format setup cluster-up cluster-down
train: setup
	$(BIN)/python -m src.cli fit --config $(CONFIG)

# A worker that is lost is not replaced: xdist gives its replacement nothing to do and waits for it for ever.
test: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0

# One process: a dozen of Slurm's would starve tests that watch the clock of a hang.
test-cluster: setup
	$(BIN)/python -m pytest -m cluster tests/cluster

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

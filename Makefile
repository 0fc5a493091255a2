# make train | test | lint | setup — everything runs in .venv, which the first call makes.
# make engine-tests — the template's tests of src/engine/ and slurm/, after an edit of yours there; needs its repository.
# make cluster-up | cluster-down — a Slurm of four nodes on this machine, installed if need be; needs root and no .venv.
PYTHON ?= python3
CONFIG ?= configs/cpu.yaml
BIN := .venv/bin

# A worker that is lost is not replaced: xdist gives its replacement nothing to do and waits for it for ever.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0

.PHONY: train test engine-tests lint format setup cluster-up cluster-down
train: setup
	$(BIN)/python -m src.cli fit --config $(CONFIG)

test: setup
	$(PYTEST)

# The version that this project is of, as cruft knows it.
of_cruft = $(shell sed -n 's/^ *"$(1)": "\(.*\)",$$/\1/p' .cruft.json 2>/dev/null)
TEMPLATE ?= $(call of_cruft,template)
COMMIT ?= $(call of_cruft,commit)
engine-tests: setup
	@test -n "$(TEMPLATE)" || { echo "no .cruft.json: make engine-tests TEMPLATE=<repository> COMMIT=<the project's>"; exit 2; }
	rm -rf .cache/template
	git clone --quiet "$(TEMPLATE)" .cache/template
	git -C .cache/template checkout --quiet "$(COMMIT)"
	rm -r .cache/template/src .cache/template/slurm
	cp -r src slurm .cache/template
	cd .cache/template && $(CURDIR)/$(PYTEST) template_tests/engine template_tests/launcher template_tests/distributed template_tests/strategies

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

cluster-up:
	@$(PYTHON) -m slurm.local up --install

cluster-down:
	@$(PYTHON) -m slurm.local down

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[slurm,vision,dev]'
	touch $@

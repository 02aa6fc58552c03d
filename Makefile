# Every target sets up .venv itself when it is missing or pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
EXP ?= staleness_sweep
FILE ?= areal_128
ARGS ?=
PEERS ?=

.PHONY: help sim plan validation run test test-slow test-flower lint bench clean

help:
	@echo "make sim EXP=name [ARGS='--seeds 5 --set run.time_s=100']   a study of sims/ under the virtual clock"
	@echo "make plan FILE=name                                         search a configuration: a plan of sims/plans, or a file"
	@echo "make validation                                             published numbers beside predictions: docs/validation-rl.md"
	@echo "make run EXP=name                                           an experiment of experiments/ on real processes"
	@echo "make bench [PEERS='flwr flgo appfl']                        lease completions, or client updates beside peers"
	@echo "make test | test-slow | test-flower | lint | clean"

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv with the tested versions; the first time this takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,dev]'
	@touch $(READY)

sim: $(READY)
	@$(BIN)/fedasync sim $(EXP) $(ARGS)

plan: $(READY)
	@$(BIN)/fedasync plan $(FILE) $(ARGS)

validation: $(READY)
	@$(BIN)/fedasync validate $(ARGS)

run: $(READY)
	@$(BIN)/fedasync run $(EXP) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow" $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto -m slow --ignore=tests/flower --ignore=tests/threads --ignore=tests/studies/test_experiment_processes.py $(ARGS)

# Federations of real processes, one after the other: kills, restarts, TLS, ten minutes of random kills.
test-flower: $(READY)
	$(BIN)/python -m pytest -n 0 -s -m slow tests/flower tests/threads tests/studies/test_experiment_processes.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
ifeq ($(strip $(PEERS)),)
	$(BIN)/python bench/event_loop.py $(ARGS)
	$(BIN)/python bench/batch_sizes.py
	$(BIN)/python bench/local_training.py
	$(BIN)/python bench/arrays.py --quick
	$(BIN)/python bench/cluster.py --versions 50
else
	@$(BIN)/python -c "import psutil" 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt psutil
	$(BIN)/python bench/peers.py $(PEERS) $(ARGS)
endif

clean:
	rm -rf .venv .bench results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# `make demo` and `make test` are the whole set-up: each makes .venv first if it is missing or stale.
# Needs python3 (3.10 to 3.13), make and a package index. No GPU, CUDA or cuDNN.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# pyright would otherwise ask the network at every run whether a newer release exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo verify doctor test check lint types examples notebooks format bench clean \
	gpu-test

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt

# cuDNN Frontend records a graph without CUDA, which is what the tests read; what it would bring
# along, gigabytes of CUDA, they do not need.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --config-settings editable_mode=compat --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--no-deps nvidia-cudnn-frontend
	touch $@

# Threads that wait for each other asleep, not spinning, get along with whatever else runs.
demo: $(STAMP)  ## the main job: graphs, folds, error table, training on a real text (under 3 minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m ropegraph demo $(ARGS)

verify: $(STAMP)  ## the fold table on this machine, every row, forward and backward, by every engine
	$(BIN)/python -m ropegraph verify $(ARGS)

doctor: $(STAMP)  ## versions, devices, and which engine serves what: for a bug report
	$(BIN)/python -m ropegraph doctor $(ARGS)

test: $(STAMP)  ## every test that needs no GPU, in two processes of one thread each
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --ignore=tests/gpu -n 2 --dist worksteal $(ARGS)
	@echo 'tests/gpu was left out: on a CUDA device, `make gpu-test` runs it (PYTHON=... names the python)'

# Under the sanitizers only our kernels are watched, in one test of each kind.
WATCHED := one_rotation or token_after_token or a_training_step_through_attention or \
	a_graph_with_attention or every_kind_of_positions or bytes_by_hand or every_byte_of_mxfp8 or \
	the_gradient_over_all_heads

gpu-test:  ## what needs a CUDA device, on every engine, and the kernels under compute-sanitizer
	$(PYTHON) -m pytest tests/gpu $(ARGS)
	for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
		--report-api-errors no --kernel-regex 'kns=rope_' --kernel-regex 'kns=mla_' --kernel-regex 'kns=norm_' \
		--kernel-regex 'kns=mean_' \
		$(PYTHON) -m pytest tests/gpu -q -k '$(WATCHED)' || exit 1; done

check: lint types examples  ## lint, formatting, types, and every script of examples/

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

examples: $(STAMP)  ## run every script of examples/
	@set -e; for script in examples/*.py; do \
		echo "== $$script"; OMP_WAIT_POLICY=PASSIVE PYTHONPATH=. $(BIN)/python "$$script"; done

notebooks: $(STAMP)  ## execute examples/notebooks in place (ARGS="02_fold_rules": that one alone)
	$(BIN)/python examples/notebooks/execute.py $(ARGS)

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## time rope + attention, on a GPU every fused form too (ARGS="--record FILE --only GROUP")
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m ropegraph bench $(ARGS)

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

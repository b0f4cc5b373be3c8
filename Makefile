# Every target sets up what it needs; run it again and only what changed is done.
#
# On a fresh Debian 12:  apt-get install git make python3 python3-venv ca-certificates e2fsprogs
# Everything else comes from the Python package registry: torch, the S3 server for the tests, node for pyright.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
WORKERS ?= 4
# Hundreds of processes would else compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long check bench perf power chaos soak fuzz test-minio constraints clean
.DEFAULT_GOAL := test

demo: $(READY)  ## the main job end to end: train, kill, resume; local disk, then S3
	$(BIN)/python -m examples.demo $(ARGS)

# More workers than cores: much of a test is waiting. A file stays with one worker, and so do its servers and ranks.
test: check  ## all checks, then all tests, in WORKERS processes; ARGS goes to pytest
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(READY)  ## lost training time, time to durable and restore of ckptd and its peers; ARGS="--help" says what else
	$(BIN)/python -m bench $(ARGS)

power: $(READY)  ## loss of power after every change of the disk, in many stories; ARGS="--first SEED --seeds N"
	$(BIN)/python -m tests.power $(ARGS)

test-long: $(READY)  ## further variants, which no default run has time for, and new examples of all properties
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m "long or hypothesis" --hypothesis-profile random $(ARGS)

perf: $(READY)  ## a few ratios against wide bounds, on a quiet machine
	$(BIN)/python -m pytest -m perf $(ARGS)

chaos: $(READY)  ## kills and stops at any instant; ARGS="--seed N --kills M", from seed N on; --matrix: at every step
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(READY)  ## twenty ranks on one daemon with slow stores, and what they hold; ARGS="--seconds 3600"
	$(BIN)/python -m tests.soak $(ARGS)

# Its fuzzer is large, and nothing else needs it.
fuzz: $(READY)  ## bytes for one decoder, guided by what code they reach; ARGS="manifest -max_total_time=600"
	$(BIN)/pip install --quiet atheris==3.0.0
	$(BIN)/python -m tests.hostile.fuzz $(ARGS)

test-minio: $(READY)  ## the S3 tests against the server that CKPTD_TEST_S3_{ENDPOINT,ACCESS_KEY,SECRET_KEY,BUCKET} name
	@: $${CKPTD_TEST_S3_ENDPOINT:?set it to the URL of an S3 server} $${CKPTD_TEST_S3_ACCESS_KEY:?} \
	  $${CKPTD_TEST_S3_SECRET_KEY:?} $${CKPTD_TEST_S3_BUCKET:?}
	$(BIN)/python -m pytest -m s3 $(ARGS)

# torch is a step of its own, so that no other package's wish picks another build of it.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptd needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench,s3,fsspec,torch]'
	@touch $@

constraints: $(READY)  ## pin what is installed now
	$(BIN)/pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# `make demo` and `make test` need nothing but Python 3.11 to 3.13 and make: they create .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# empty: processes keep bytecode, as they do by default; compiling the tree anew costs each of them a second
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# three on two cores, because tests of Slurm and of deadlines wait for most of their time
PARALLEL := --workers 3
# a command, or command:part
BENCHES := nested prediction:prediction_speed prediction:step_times budget chunking chunking:chunk_points \
	overhead overhead:steps tree
GPU_WHEELS := antlr4-python3-runtime|hydra-core|omegaconf|submitit

TORCH ?= 2.15.0
COMPAT ?= .compat/torch-$(TORCH)-python-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')

.PHONY: demo test quick matrix gallery check lint bench compat gpu gpu-rehearsal gpu-wheels clean

demo: $(STAMP)
	$(BIN)/acbench -m name=demo model=gpt_nano data=text batch_size=4 protocol=smoke protocol.timed_pairs=8 'ac=glob(*)' mesh=single,shard2

# Everything that this machine can run, but of each matrix only the rows that put every two values together.
test: $(STAMP)
	$(PYTEST) $(PARALLEL)

# What to run after each change: no slow test, and one of each expensive kind.
quick: $(STAMP)
	$(PYTEST) --workers 2 -m 'not matrix and not slow and not expensive'

# The same as `test`, with every row of every matrix and all proofs of tests/matrix, which resume (FRESH=1: all again).
matrix: $(STAMP)
	$(PYTEST) $(PARALLEL) -m '' $(if $(FRESH),--fresh)

# Known silent defects and their controls (docs/gallery), judged; to run again with every release of torch.
gallery: $(STAMP)
	$(BIN)/python -m tests.gallery.judge

# What a change must pass.
check: lint test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	for name in $(BENCHES); do $(BIN)/python -m bench.$$(echo $$name | sed 's/:/ --part /') || exit 1; done
	$(BIN)/python -m bench.chunking --part chunk_points --training --out outputs/bench/chunk_points_training.json

# What acbench does with another torch or Python, in an environment of its own, which stays (some 6 GB with CUDA):
# `make compat TORCH=2.11.0 PYTHON=python3.12`.
compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python -m bench.compat --out outputs/bench/compat_$(TORCH).json $(if $(AGAINST),--against $(AGAINST))

$(COMPAT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	sed '/^torch==/d' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install --quiet --constraint $(COMPAT)/constraints.txt torch==$(TORCH) --editable '.[test]'
	touch $@

# One command for a machine with a GPU (docs/gpu.md); three files under $$OUT, default outputs/gpu. It uses the machine's
# own python3 and torch, and no network. STAGES="tests parity" chooses, MINUTES=9.5 ends in time.
gpu:
	$(PYTHON) -m bench.gpu $(STAGES) $(if $(MINUTES),--minutes $(MINUTES))

# Every command of `make gpu`, on the CPU with tiny sizes.
gpu-rehearsal: $(STAMP)
	$(BIN)/python -m bench.gpu --rehearse --out outputs/gpu-rehearsal $(STAGES)

# What a machine for GPU work usually lacks, for any Python, into .whl/, where `make gpu` finds it.
gpu-wheels:
	grep -E '^($(GPU_WHEELS))==' constraints.txt | xargs $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir .whl

clean:
	rm -rf $(VENV) .compat build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# `make demo` and `make test` need nothing but Python 3.11 to 3.13 and make: they create .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# three, because tests of Slurm and of deadlines wait for most of their time
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
BENCHES := exactness toy nested parity_matrix sharding chunking chunk_points detection point_overhead instrumentation \
	planning reports answers trial_cost tree
SLURM_BENCHES := packing survival scale faults

TORCH ?= 2.15.0
COMPAT ?= .compat/torch-$(TORCH)-python-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')

.PHONY: demo test quick matrix check lint bench bench-slurm compat gpu clean

demo: $(STAMP)
	$(BIN)/acbench -m name=demo model=gpt_nano data=text protocol=smoke 'ac=glob(*)' mesh=single,shard2

# Everything that this machine can run, but of each matrix only the rows that put every two values together.
test: $(STAMP)
	$(PYTEST) $(PARALLEL)

# What to run after each change: no slow test, and one of each expensive kind.
quick: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m 'not matrix and not slow and not expensive'

# The same as `test`, with every row of every matrix.
matrix: $(STAMP)
	$(PYTEST) $(PARALLEL) -m ''

# What a change must pass.
check: lint test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done
	$(BIN)/python -m bench.chunk_points --training --out outputs/bench/chunk_points_training.json

# Needs Debian's slurm-wlm and munge: each starts and stops a private Slurm of its own (slurm/cluster.sh).
bench-slurm: $(STAMP)
	for name in $(SLURM_BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done

# What acbench does with another torch or Python, in an environment of its own, which stays (some 6 GB with CUDA):
# `make compat TORCH=2.11.0 PYTHON=python3.12`.
compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python -m bench.compat --out outputs/bench/compat_$(TORCH).json $(if $(AGAINST),--against $(AGAINST))

$(COMPAT)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	sed '/^torch==/d' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install --quiet --constraint $(COMPAT)/constraints.txt torch==$(TORCH) --editable '.[test]'
	touch $@

# One command for a machine with a GPU: the gpu tests and every benchmark, JSON under $$OUT (default outputs/gpu).
gpu:
	sh bench/gpu.sh

clean:
	rm -rf $(VENV) .compat build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

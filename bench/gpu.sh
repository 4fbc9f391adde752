#!/bin/sh
# One command for a machine with a GPU: the gpu tests, then every benchmark that says something on CUDA.
#
#   make gpu                       # results under outputs/gpu
#   OUT=/somewhere make gpu        # results there
#
# It uses the machine's own python3 and torch, and no network. What that python lacks (hydra-core, omegaconf,
# antlr4-python3-runtime, rich, nvidia-ml-py, wandb, submitit, cloudpickle, pytest, pytest-timeout, hypothesis) may lie as wheels in
# .whl/; make them elsewhere with `pip wheel --no-deps --wheel-dir .whl <name>==<pin of constraints.txt> ...`, for
# that python. They win over what the machine has, so leave torch and what it needs out.
#
# A stage that fails does not keep the others from running; the exit status tells that one did.
set -u

PYTHON=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT" || exit 1
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

"$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
    echo "make gpu: needs a CUDA device, and the torch of $PYTHON sees none" >&2
    exit 1
}

mkdir -p "$OUT"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
if [ -d .whl ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$WORK/packages" .whl/*.whl || exit 1
    export PYTHONPATH="$PYTHONPATH:$WORK/packages"
fi

failed=""
stage() {
    name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed $name"
}

stage tests "$PYTHON" -m pytest -m gpu tests -p no:cacheprovider --junitxml "$OUT/tests.xml"
stage exactness "$PYTHON" -m bench.exactness --device cuda --out "$OUT/exactness.json"
stage parity "$PYTHON" -m bench.parity_matrix --device cuda --meshes single --out "$OUT/parity_matrix.json"
stage detection "$PYTHON" -m bench.detection --device cuda --out "$OUT/detection.json"
stage instrumentation "$PYTHON" -m bench.instrumentation --device cuda --model gpt_small --sequence-length 512 \
    --out "$OUT/instrumentation.json"
# does offloading overlap with computation: its step time beside that of the others
stage sweep "$PYTHON" -m harness -m name=sweep "outputs_dir=$WORK" model=gpt_small mesh=single mesh.device=cuda \
    'ac=glob(*)' dtype=bf16_mixed batch_size=16 sequence_length=1024 data=synthetic tracker=none protocol=standard
stage records "$PYTHON" -m docs.tools.records "$WORK/sweep" --out "$OUT/sweep.json"

[ -z "$failed" ] || {
    echo "make gpu: failed:$failed" >&2
    exit 1
}

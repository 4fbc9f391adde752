"""What `acbench-fit` finds for models that ship and of `transformers`: blocks, cost, and if bytes are right.

Each model is asked about in a process of its own, for a memory between those of `none` and `full`. CPU
seconds and resident memory are those of the whole answer, imports and proof included. Then every option is
trained on the CPU for a step under the meters; its bytes have to be the predicted ones.

    python -m bench.prediction --part fit --models gpt_nano hf:GPT2Config
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.table import table_of
from harness.command_line.fit_words import asked
from harness.experiment.experiment import Experiment
from harness.fit.answer import answer
from harness.measure.step import instrument
from harness.predict.prediction import step_of
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.steps import UNMEASURED_STEPS, warm_up

_SMALL = "--batch 8 --seq 64 --on epyc_9004"
_HF = f"{_SMALL} num_hidden_layers=4 hidden_size=128 num_attention_heads=4"
MODELS = {
    "gpt_nano": _SMALL,
    "llama_nano": _SMALL,
    "moe_nano": _SMALL,
    "vit_nano": "--batch 8 --on epyc_9004",
    "evoformer": "--batch 2 --on epyc_9004",
    "unet": "--batch 4 --on epyc_9004",
    "hf:GPT2Config": _HF,
    "hf:LlamaConfig": f"{_HF} num_key_value_heads=2 intermediate_size=384",
    "hf:BertConfig": f"{_HF} intermediate_size=512",
    "hf:T5Config": f"{_SMALL} num_layers=3 d_model=128 d_ff=512 num_heads=4 d_kv=32",
    "hf:ViTConfig": "--batch 4 --on epyc_9004 num_hidden_layers=4 hidden_size=128 num_attention_heads=4",
}
"""Words of the command by model; the memory is found here."""

_BETWEEN = 0.5
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was found for one model.

    Fields:
        model: as the command names it.
        blocks: which blocks, in words.
        use: variant of the answer; `None` where nothing fits.
        verdict: verdict of its proof.
        cpu_s: CPU seconds of the answer, imports included.
        resident_mib: highest resident memory until then.
        exact: options whose bytes are the measured ones.
        measured: options that ran.
        wrong: variants with other bytes.
    """

    model: str
    blocks: str
    use: str | None
    verdict: str
    cpu_s: float
    resident_mib: int
    exact: int
    measured: int
    wrong: tuple[str, ...] = ()


def result_of(model: str, words: str) -> Result:
    """Return what is found for a model, in this process."""
    asking = asked([model, *words.split()]).subject
    none, full = (step_of(each, "cpu").memory.peak_bytes for each in (asking.plain, asking.experiment))
    usable = (full + _BETWEEN * (none - full)) / (1 - asking.margin)
    subject = replace(asking, hardware=replace(asking.hardware, usable_gib=usable / _GIB))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = answer(subject).written(Path(folder))
        cpu_s = time.process_time()
        resident_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        wrong = [
            each.variant
            for each in found.options
            if (each.peak_bytes, each.saved_bytes) != _measured(each.experiment)
        ]
    use = found.use
    return Result(
        model=model,
        blocks=found.blocks.words.partition(": ")[2],
        use=None if use is None else use.variant,
        verdict="unverified" if use is None else use.verdict,
        cpu_s=cpu_s,
        resident_mib=resident_mib,
        exact=len(found.options) - len(wrong),
        measured=len(found.options),
        wrong=tuple(wrong),
    )


def _measured(experiment: Experiment) -> tuple[int, int]:
    """Return the peak and the saved bytes of a step on the CPU; host memory is part of the peak there."""
    device = torch.device("cpu")
    batch = batches(experiment, device, dp_rank=0)
    trainee = assemble(experiment, device, None, batch(0))
    warm_up(trainee, batch)
    memory = instrument(trainee, batch(UNMEASURED_STEPS)).memory
    return memory.peak_bytes + memory.host_peak_bytes, memory.saved_bytes


def main(words: Sequence[str]) -> int:
    """Ask about each model in a process of its own, and print the table."""
    arguments = parser(__doc__, "fit", "prediction")
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--one", help="a model to ask about in this process", choices=list(MODELS))
    given = arguments.parse_args(words)
    if given.one is not None:
        sys.stdout.write(json.dumps(asdict(result_of(given.one, MODELS[given.one]))) + "\n")
        sys.stdout.flush()
        os._exit(0)
    results = [_asked(model) for model in given.models]
    publish(
        _table(results),
        given.out,
        protocol={"between": _BETWEEN, "words": {model: MODELS[model] for model in given.models}},
        results=[asdict(each) for each in results],
    )
    return 0


def _asked(model: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "bench.prediction", "--part=fit", "--one", model],
        capture_output=True,
        text=True,
        check=True,
    )
    print(done.stdout.strip(), flush=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(**{**found, "wrong": tuple(found["wrong"])})


def _table(results: Sequence[Result]) -> Table:
    columns = {
        "model": "model",
        "blocks": "blocks",
        "use": "use",
        "verdict": "verdict",
        "CPU s": "cpu_s:.1f",
        "MiB": "resident_mib",
        "exact": "exact",
        "of": "measured",
    }
    return table_of(results, columns)

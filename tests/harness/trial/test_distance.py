"""No variant is below the bound of its step's operators at the peak that it measures."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.measure.step import StepReport, instrument
from harness.records.bound import contradiction, merge_bounds
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.distance import measured_bound, unbounded
from harness.trial.twin_step import TwinStep

CPU = torch.device("cpu")
SMALL = ("sequence_length=32", "mesh.device=cpu", "optimizer=sgd")
MODELS = {
    "gpt": ("model=gpt_nano", "model.dropout=0.1", "batch_size=8"),
    "llama": ("model=llama_nano", "batch_size=32"),
    "vit": ("model=vit_nano", "batch_size=16"),
}
VARIANTS = {
    "full": ("ac=full",),
    "full, reentrant": ("ac=full", "ac.use_reentrant=true"),
    "full, inputs on the host": ("ac=full", "ac.offload=true"),
    "every second block": ("ac=selective_layer",),
    "nested": ("ac=nested", "ac.levels=[2]"),
    "kept matmuls": ("ac=selective_op",),
}


def experiment(*words: str) -> Experiment:
    (found,) = experiments([[*SMALL, *words]])
    return found


def step(of: Experiment) -> StepReport:
    batch = batches(of, CPU, 0)
    trainee = assemble(of, CPU, None, batch(0))
    instrument(trainee, batch(0))
    return instrument(trainee, batch(0))


@cache
def plain(model: str) -> TwinStep:
    report = step(experiment(*MODELS[model]))
    return TwinStep.of(report, report.memory)


@pytest.mark.parametrize("model", MODELS)
def test_no_variant_is_below_its_bound(model: str) -> None:
    twin, above = plain(model), {}
    for name, words in VARIANTS.items():
        of = experiment(*MODELS[model], *words)
        report = step(of)
        bound = measured_bound(report.memory, report.work, twin, is_ordered=True)
        merged = merge_bounds([bound])
        assert merged is not None
        assert contradiction([bound], merged) is None
        assert merged.lower_bound_autograd_flops is not None
        assert 0 <= merged.lower_bound_extra_flops <= merged.lower_bound_autograd_flops
        above[name] = (merged.lower_bound_autograd_flops, merged.points_above)
    assert above["full"][0] > 0
    assert above["nested"][1] > above["every second block"][1] > above["kept matmuls"][1] == 0


@pytest.mark.parametrize(
    ("words", "has_twin", "reason"),
    [
        pytest.param(("ac=full",), True, None, id="a variant"),
        pytest.param(("ac=full",), False, "no twin was measured", id="a variant without a twin"),
        pytest.param((), True, "no variant of activation checkpointing", id="the plain model"),
        pytest.param(
            ("ac=full", "compile=aot_eager"), True, "compiled code runs other operators", id="compiled"
        ),
        pytest.param(
            ("ac=full", "microbatches=2"), True, "the bound is that of one forward", id="micro-batches"
        ),
        pytest.param(
            ("ac=full", "chunk=budget", "chunk.budget_mib=64"), True, "chunks cut operators", id="chunks"
        ),
    ],
)
def test_what_has_no_bound_says_why(words: tuple[str, ...], has_twin: bool, reason: str | None) -> None:
    why = unbounded(experiment(*MODELS["gpt"], *words), has_twin=has_twin)
    assert why == reason or (reason is not None and why is not None and why.startswith(reason))

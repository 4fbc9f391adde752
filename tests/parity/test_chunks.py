"""Chunks in composition: with every AC variant, on meshes of data, in every precision.

A chunked trial equals its twin within the tolerance that it declares. Activation checkpointing on top of
chunks changes no bit of what the chunks alone compute. What a step holds is measured as a trial measures it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.measure.step import instrument
from harness.models.evoformer import EvoformerSpec
from strategies import ac_variants
from strategies.regions.host import allocating_on_host
from tests.parity import cases
from tests.rank_pool import RankPool

NOTHING = ac_variants["none"]()
# enough for activations to outweigh the gradients that FSDP holds
BATCH_SIZES = {"gpt": 32, "vit": 32, "evoformer": 4}
# of the peak that a variant leaves: what it saves itself is out of reach for chunks
FRACTIONS = {
    "none": 0.5,
    "selective_layer": 0.5,
    "full": 0.7,
    "nested": 0.7,
    "selective_op": 0.9,
    "offload": 0.95,
}
ON_TWO_RANKS = [
    ("gpt", "budget", "shard2", "none", 0.1),
    ("gpt", "budget", "shard2", "full", 0.1),
    ("gpt", "budget", "shard2", "nested", 0.0),
    ("gpt", "budget", "ddp2", "offload", 0.1),
    ("vit", "minimum", "ddp2", "full", 0.1),
    ("vit", "minimum", "shard2", "offload", 0.0),
    ("evoformer", "minimum", "shard2", "full", 0.1),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What one rank found.

    Fields:
        differs: from the plain twin, in words.
        differs_by_ac: from the same chunks without AC, bit for bit.
        measured_bytes: activation peak of a step.
        allowed_bytes: of the plan; its budget, or the smallest peak.
        chunks: bodies that ran in a forward.
    """

    differs: list[str]
    differs_by_ac: list[str]
    measured_bytes: int
    allowed_bytes: int
    chunks: int


def examine(rank: int, case: Experiment) -> Examined:
    batches = cases.batches_of(rank, case)
    trainee = cases.assembled(case, batches[0])
    for batch in batches:  # what is made once is there before anything is measured
        trainee.zero_grad()
        _, loss = trainee.forward(batch)
        trainee.backward(loss)
        trainee.update()
    measured = instrument(trainee, batches[0], is_host=allocating_on_host)
    observed = trainee.observe()
    assert observed.plan is not None
    plan = observed.plan["chunk"]
    return Examined(
        differs=cases.prove(rank, case),
        differs_by_ac=cases.prove(rank, case, replace(case, ac=NOTHING)) if case.ac != NOTHING else [],
        measured_bytes=measured.memory.activation_peak_bytes,
        allowed_bytes=plan["budget_bytes"] or plan["predicted_peak_bytes"],
        chunks=observed.chunks,
    )


def chunked(model: str, chunk: str, mesh: str, variant: str, dropout: float, **recipe: Any) -> Experiment:
    case = cases.experiment(
        model=model,
        mesh=cases.MESHES[mesh],
        variant=variant,
        chunk=chunk,
        chunk_options={"fraction": FRACTIONS[variant]} if chunk == "budget" else {},
        dropout=dropout,
        parity_steps=2,
        sequence_length=32,
        **{"batch_size": BATCH_SIZES[model], **recipe},
    )
    # its block has ten times the operators of the others
    if not isinstance(case.model, EvoformerSpec):
        return case
    return replace(case, model=replace(case.model, n_layers=1))


def assert_neutral(found: Examined) -> None:
    assert (found.differs, found.differs_by_ac) == ([], [])
    assert found.chunks > 0


@functools.cache
def on_one_rank(variant: str, dropout: float) -> Examined:
    return examine(0, chunked("gpt", "budget", "single", variant, dropout))


@pytest.mark.parametrize(
    ("variant", "dropout"), [("none", 0.0), ("full", 0.0), *((name, 0.1) for name in ac_variants)]
)
def test_one_rank_is_neutral(variant: str, dropout: float) -> None:
    assert_neutral(on_one_rank(variant, dropout))


@pytest.mark.parametrize("variant", ac_variants)
def test_one_rank_keeps_the_budget(variant: str) -> None:
    found = on_one_rank(variant, 0.1)
    assert found.measured_bytes <= found.allowed_bytes


@pytest.mark.parametrize(("model", "chunk", "mesh", "variant", "dropout"), ON_TWO_RANKS)
def test_two_ranks_are_neutral_and_keep_the_budget(
    pool2: RankPool, model: str, chunk: str, mesh: str, variant: str, dropout: float
) -> None:
    for found in pool2.run(examine, chunked(model, chunk, mesh, variant, dropout), timeout_s=300.0):
        assert_neutral(found)
        assert found.measured_bytes <= found.allowed_bytes


@functools.cache
def in_reduced_precision(dtype: str) -> Examined:
    return examine(0, chunked("gpt", "budget", "single", "full", 0.1, dtype=dtype, batch_size=8))


@pytest.mark.parametrize("dtype", ["bf16", "bf16_mixed"])
def test_reduced_precision_is_neutral(dtype: str) -> None:
    assert in_reduced_precision(dtype).differs == []


@pytest.mark.parametrize("dtype", ["bf16", "bf16_mixed"])
def test_reduced_precision_keeps_the_budget_and_ac_changes_no_bit(dtype: str) -> None:
    found = in_reduced_precision(dtype)
    assert (found.differs_by_ac, found.chunks > 0) == ([], True)
    assert found.measured_bytes <= found.allowed_bytes

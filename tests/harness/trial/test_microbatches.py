"""A step of several micro-batches: the gradients of the whole batch, and the bytes and calls of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import Snapshot, steps
from harness.measure.step import StepReport, instrument
from harness.measure.trainee import Watcher, forward_and_backward
from harness.models.base import Batch, joined
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.parallel import cpu_stands_in_for_cuda
from harness.trial.plan_budget import with_plan
from harness.trial.steps import warm_up
from tests.parity.cases import assembled, experiment, prove
from tests.rank_pool import RankPool

_CPU = torch.device("cpu")


def _made(case: Experiment) -> tuple[Assembled, list[Batch]]:
    """Return a fresh model of a case on one rank, with the batches of three steps."""
    batch = batches(case, _CPU, 0)
    return assemble(case, _CPU, None, batch(0).parts()[0]), [batch(step) for step in range(3)]


def _trained(case: Experiment, step: Any = Assembled.step) -> Iterator[Snapshot]:
    trainee, batch = _made(case)
    mutant = type("Mutant", (Assembled,), {"step": step})
    made = mutant(**{name: getattr(trainee, name) for name in Assembled.__dataclass_fields__})
    return steps(made, batch, seed=case.seed)


@cache
def _measured(microbatches: int, variant: str = "none") -> StepReport:
    case = experiment(variant=variant, microbatches=microbatches, model="llama")
    trainee, batch = _made(case)
    warm_up(trainee, batch.__getitem__)
    return instrument(trainee, batch[2])


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_gradients_are_those_of_the_whole_batch(model: str, microbatches: int) -> None:
    whole, cut = (
        next(_trained(experiment(variant="none", model=model, microbatches=count)))
        for count in (1, microbatches)
    )
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(cut.gradients[name].value, gradient.value, rtol=1e-4, atol=1e-6)
    losses = [loss.value for loss in cut.loss.values()]
    torch.testing.assert_close(sum(losses), whole.loss["loss"].value)


def test_micro_batches_are_the_rows_of_the_batch_in_their_order() -> None:
    whole, cut = (batches(experiment(variant="none", microbatches=count), _CPU, 0)(1) for count in (1, 2))
    assert [part.inputs[0].tolist() for part in cut.parts()] == [
        rows.tolist() for rows in whole.inputs[0].split(2)
    ]
    assert whole.parts() == (whole,)


def test_every_block_runs_once_a_micro_batch() -> None:
    assert _measured(4).work.calls == {"layers.0": 4, "layers.1": 4}
    assert _measured(4, "full").work.calls == {"layers.0": 8, "layers.1": 8}


def test_flops_are_those_of_the_whole_batch() -> None:
    for variant in ("none", "full"):
        whole, cut = (_measured(count, variant).work for count in (1, 4))
        assert cut.forward_flops == whole.forward_flops
        assert cut.backward_flops == whole.backward_flops
        assert cut.recomputed_flops == whole.recomputed_flops


def test_saved_bytes_are_those_of_one_forward() -> None:
    case = experiment(variant="none", model="llama", batch_size=1)
    trainee, batch = _made(case)
    warm_up(trainee, batch.__getitem__)
    alone = instrument(trainee, batch[2]).memory
    divisor_bytes = 8  # of the loss, which backward divides by it too
    assert _measured(4).memory.saved_bytes == alone.saved_bytes + divisor_bytes
    # the second micro-batch has the gradients of the first, and makes its own
    assert alone.peak_bytes < _measured(4).memory.peak_bytes < _measured(1).memory.peak_bytes


def test_parts_of_the_peak_add_up() -> None:
    memory = _measured(4).memory
    assert sum(memory.peak_parts.values()) == memory.peak_bytes


def _dropping_the_last(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    parts = batch.parts()
    Assembled.step(trainee, joined(parts[:-1]) if len(parts) > 2 else batch, watcher)


def _unscaled(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    for part in batch.parts():
        forward_and_backward(trainee, part, watcher)


def _scaled_twice(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    for part in batch.parts():
        forward_and_backward(trainee, part, watcher, microbatches=len(batch.parts()) ** 2)


def _scaled_once_more_after(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    Assembled.step(trainee, batch, watcher)
    for parameter in trainee.model.parameters():
        assert isinstance(parameter.grad, Tensor)
        parameter.grad /= len(batch.parts())


def _twice_the_first(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    parts = batch.parts()
    Assembled.step(trainee, joined((parts[0], *parts[:-1])), watcher)


@pytest.mark.parametrize(
    ("step", "part", "name"),
    [
        pytest.param(_dropping_the_last, "outputs", "microbatch[3].outputs", id="the last one is dropped"),
        pytest.param(_unscaled, "loss", "microbatch[0].loss", id="the loss is not scaled"),
        pytest.param(_scaled_twice, "loss", "microbatch[0].loss", id="the loss is scaled twice"),
        pytest.param(_scaled_once_more_after, "gradients", "norm.weight", id="gradients are scaled again"),
        pytest.param(_twice_the_first, "outputs", "microbatch[1].outputs", id="the first one comes twice"),
    ],
)
def test_the_comparison_rejects_a_step_that_is_another(step: Any, part: str, name: str) -> None:
    case = experiment(variant="none", microbatches=4)
    found = compare_steps(_trained(case), _trained(case, step), count=1, rank=0, tolerance=None)
    assert found.first is not None
    assert (found.first.part, found.first.name) == (part, name)
    same = compare_steps(_trained(case), _trained(replace(case)), count=1, rank=0, tolerance=None)
    assert same.is_equal


@pytest.mark.parametrize(
    ("count", "batch_size", "words"),
    [
        (0, 4, "microbatches: must be at least 1, got 0"),
        (
            3,
            4,
            "microbatches: must divide the 4 samples of a step, got 3; make batch_size a multiple of 3",
        ),
    ],
)
def test_refusals(count: int, batch_size: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment(microbatches=count, batch_size=batch_size)
    assert str(refusal.value) == words


def test_one_micro_batch_leaves_the_address_of_a_trial() -> None:
    assert "microbatches" not in experiment().to_dict()
    assert experiment(microbatches=2).to_dict()["microbatches"] == 2


_MESHES = {
    "ddp2": Mesh(dp_replicate=2),
    "shard2": Mesh(dp_shard=2),
    "no reshard": Mesh(dp_shard=2, reshard_after_forward=False),
    "offload": Mesh(dp_shard=2, cpu_offload=True),
    "fsdp1": Mesh(dp_shard=2, fsdp="fsdp1"),
    "fsdp1 flat": Mesh(dp_shard=2, fsdp="fsdp1", use_orig_params=False),
    "fsdp1 offload": Mesh(dp_shard=2, fsdp="fsdp1", cpu_offload=True),
    "tp2": Mesh(tp=2),
    "hsdp2x2": Mesh(dp_replicate=2, dp_shard=2),
    "shard2_tp2": Mesh(dp_shard=2, tp=2),
}

_NEUTRAL = [
    ("full", "shard2", "last"),
    ("selective_op", "fsdp1", "last"),
    ("nested", "ddp2", "each"),
    ("offload", "shard2", "each"),
]
"""A few of the rows of `tests/matrix/test_microbatches.py`."""


@pytest.mark.parametrize(("variant", "mesh", "sync"), _NEUTRAL)
def test_is_bitwise_neutral(variant: str, mesh: str, sync: str, pool2: RankPool) -> None:
    case = experiment(
        variant=variant, mesh=replace(_MESHES[mesh], sync=sync), microbatches=2, dropout=0.1, parity_steps=2
    )
    assert pool2.run(prove, case) == [[], []]


def test_a_plan_holds_for_every_micro_batch(tmp_path: Path) -> None:
    case = experiment(variant="budget", options={"fraction": 0.9}, microbatches=2)
    batch = batches(case, _CPU, 0)
    file = tmp_path / "plan.json"
    planned = with_plan(
        case, lambda each: assemble(each, _CPU, None, batch(0).parts()[0]), batch, file, device=_CPU
    )
    trainee = assemble(planned, _CPU, None, batch(0).parts()[0])
    warm_up(trainee, batch)
    measured, plan = instrument(trainee, batch(2)), json.loads(file.read_text())
    assert measured.memory.peak_bytes == plan["predicted_peak_bytes"] <= plan["budget_bytes"]
    assert measured.work.recomputed_flops == 2 * plan["extra_flops"]
    assert measured.work.calls == {"layers.0": 2, "layers.1": 2}


Counts = dict[str, int]


def _on_mesh(rank: int, case: Experiment) -> tuple[float, dict[str, Counts]]:
    """Return what `_against_whole` does, in ranks that may compute as CUDA does."""
    with cpu_stands_in_for_cuda(case.mesh, _CPU):
        return _against_whole(rank, case)


def _against_whole(rank: int, case: Experiment) -> tuple[float, dict[str, Counts]]:
    """Return how far gradients of micro-batches are from those of the whole batch, and collectives."""
    found: list[Any] = []
    collectives: dict[str, Counts] = {}
    whole_case = replace(case, microbatches=1, mesh=replace(case.mesh, sync="each"))
    for each in (whole_case, case):
        batch = batches(each, _CPU, each.mesh.data_rank(rank))
        trainee = assembled(each, batch(0).parts()[0])
        warm_up(trainee, batch)
        found.append(next(steps(trainee, [batch(2)], seed=0)).gradients)
        collectives = instrument(trainee, batch(2)).work.collectives
    whole, cut = ({name: each and each.value for name, each in gradients.items()} for gradients in found)
    assert [name for name, each in whole.items() if each is None] == [
        name for name, each in cut.items() if each is None
    ]
    errors = [
        float((cut[name] - whole[name]).abs().max() / whole[name].abs().max())
        for name in whole
        if whole[name] is not None and whole[name].numel() and whole[name].abs().max()
    ]
    return max(errors), collectives


_GATHERED = {"all_gather": 6}


@pytest.mark.parametrize(
    ("mesh", "sync", "forward", "backward"),
    [
        ("ddp2", "each", {"broadcast": 2}, {"all_reduce": 2}),
        ("ddp2", "last", {"broadcast": 1}, {"all_reduce": 1}),
        ("shard2", "each", _GATHERED, {**_GATHERED, "reduce_scatter": 6}),
        ("shard2", "last", _GATHERED, {**_GATHERED, "reduce_scatter": 3}),
        ("no reshard", "last", _GATHERED, {"reduce_scatter": 3}),
        ("offload", "each", _GATHERED, {**_GATHERED, "reduce_scatter": 6}),
        ("offload", "last", _GATHERED, {**_GATHERED, "reduce_scatter": 3}),
        ("fsdp1", "each", _GATHERED, {"all_gather": 4, "reduce_scatter": 6}),
        ("fsdp1", "last", _GATHERED, {"all_gather": 4, "reduce_scatter": 3}),
        ("fsdp1 flat", "last", _GATHERED, {"all_gather": 4, "reduce_scatter": 3}),
        ("fsdp1 offload", "last", _GATHERED, {"all_gather": 4, "reduce_scatter": 3}),
        ("tp2", "each", {"all_reduce": 8}, {"all_reduce": 20}),
    ],
)
def test_ranks_reduce_gradients(
    pool2: RankPool, mesh: str, sync: str, forward: Counts, backward: Counts
) -> None:
    _require_whole_gradients(pool2, mesh, sync, forward, backward)


@pytest.mark.parametrize(
    ("mesh", "sync", "forward", "backward"),
    [
        ("hsdp2x2", "each", _GATHERED, {**_GATHERED, "reduce_scatter": 6, "all_reduce": 6}),
        ("hsdp2x2", "last", _GATHERED, {**_GATHERED, "reduce_scatter": 3, "all_reduce": 3}),
        (
            "shard2_tp2",
            "last",
            {**_GATHERED, "all_reduce": 8},
            {**_GATHERED, "reduce_scatter": 3, "all_reduce": 20},
        ),
    ],
)
def test_four_ranks_reduce_gradients(
    pool4: RankPool, mesh: str, sync: str, forward: Counts, backward: Counts
) -> None:
    _require_whole_gradients(pool4, mesh, sync, forward, backward)


def _require_whole_gradients(pool: RankPool, mesh: str, sync: str, forward: Counts, backward: Counts) -> None:
    case = experiment(
        variant="none",
        model="llama",
        mesh=replace(_MESHES[mesh], sync=sync),
        microbatches=2,
        batch_size=8,
        optimizer="sgd",
    )
    for error, collectives in pool.run(_on_mesh, case):
        assert error < 1e-6
        assert collectives == {"forward": forward, "backward": backward, "optimizer": {}}


@pytest.mark.parametrize(
    ("mesh", "count", "words"),
    [
        pytest.param(
            {"tp": 2},
            2,
            "mesh.sync: last needs data-parallel ranks, which reduce gradients, but tp2 has one; "
            "use mesh=ddp2",
            id="nobody reduces",
        ),
        pytest.param(
            {"dp_shard": 2},
            1,
            "mesh.sync: last has no effect with one micro-batch; use microbatches=2, or mesh.sync=each",
            id="one micro-batch",
        ),
        pytest.param(
            {"dp_shard": 2, "fsdp": "fsdp1", "cpu_offload": True, "sync": "each"},
            2,
            "mesh.sync: must be last for fsdp1 with mesh.cpu_offload: torch supports no accumulation of "
            "gradients that are reduced each time, got each; or use mesh.fsdp=fsdp2",
            id="FSDP1 with parameters on the host",
        ),
    ],
)
def test_a_time_to_reduce_that_does_not_suit_is_refused(mesh: dict[str, Any], count: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment(mesh=Mesh(**{"sync": "last", **mesh}), microbatches=count)
    assert str(refusal.value) == words


def test_reduction_after_each_leaves_the_address_of_a_trial() -> None:
    each, last = (
        experiment(mesh=Mesh(dp_shard=2, sync=sync), microbatches=2).to_dict()["mesh"]
        for sync in ("each", "last")
    )
    assert each == {name: value for name, value in last.items() if name != "sync"}
    assert last["sync"] == "last"


def test_a_plan_counts_no_gradients_that_wait() -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment(variant="budget", mesh=Mesh(dp_shard=2, sync="last"), microbatches=2)
    assert str(refusal.value) == (
        "mesh.sync: must be each for ac=budget with FSDP, got last: a plan counts no unsharded gradients "
        "that wait for the last micro-batch; or use mesh=ddp2"
    )

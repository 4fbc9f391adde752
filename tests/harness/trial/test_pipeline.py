from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.measure.step import instrument
from harness.measure.trainee import BackwardPart, Watcher
from harness.models.base import Batch
from harness.records.measured import StagesInFlight
from harness.trial.batches import batches
from harness.trial.pipeline import Pipeline
from harness.trial.steps import train
from strategies.step.position import Phase
from tests.parity import cases
from tests.rank_pool import RankPool

_CPU = torch.device("cpu")

IN_FLIGHT = [
    # schedule | ranks | micro-batches | until the gradient of the input | until those of weights
    ("gpipe", 4, 8, [8, 8, 8, 8], [8, 8, 8, 8]),
    ("1f1b", 4, 8, [4, 3, 2, 1], [4, 3, 2, 1]),
    ("interleaved", 4, 8, [11, 9, 7, 5], [11, 9, 7, 5]),
    ("zero_bubble", 4, 8, [8, 7, 6, 5], [8, 8, 8, 8]),
    ("gpipe", 2, 4, [4, 4], [4, 4]),
    ("1f1b", 2, 4, [2, 1], [2, 1]),
    ("zero_bubble", 2, 4, [4, 3], [4, 4]),
]


@contextmanager
def _fake_rank(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "inputs", "weights"), IN_FLIGHT)
def test_calls_in_flight(
    schedule: str, ranks: int, microbatches: int, inputs: list[int], weights: list[int]
) -> None:
    mesh, found = Mesh(pp=ranks, pp_schedule=schedule), []
    for rank in range(ranks):
        with _fake_rank(rank, ranks):
            pipeline = Pipeline(
                {index: nn.Linear(1, 1) for index in mesh.stages_of(rank)},
                mesh=mesh,
                group=dist.group.WORLD,  # type: ignore[arg-type]  # it is there
                device=_CPU,
                microbatches=microbatches,
                sample=Batch(inputs=(torch.ones(1, 1),), targets=None),
                between=torch.ones(1, 1),
            )
        found.append(pipeline.in_flight)
    assert [each.inputs for each in found] == inputs
    assert [each.weights for each in found] == weights


class _Told(Watcher):
    """Keeps what a step says of itself: its actions, what the meters are told of them, what forwards give."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.entered = ""

    def on_action(self, action: str) -> None:
        self.words.append(action)

    def enter(self, phase: Phase, part: BackwardPart = "input") -> None:
        self.entered += "F" if phase == "forward" else part[0].upper()

    def on_forward(self, outputs: Any, loss: Tensor | None) -> None:  # noqa: ARG002 (not of interest)
        self.words.append("-" if loss is None else "loss")


def pipelined(variant: str, schedule: str, **recipe: Any) -> Experiment:
    variant, _, mode = variant.partition(" ")
    variant, *others = variant.split("/")  # one of each stage
    stages: dict[str, Any] = {"stage_ac": (variant, *others)} if others else {}
    case = cases.experiment(
        model="llama", mesh=Mesh(pp=2, pp_schedule=schedule, **recipe), variant=variant, batch_size=8,
        sequence_length=16, microbatches=4, options={"split_backward": mode} if mode else None,
        **stages,
    )  # fmt: skip
    return replace(case, model=replace(case.model, n_layers=8, max_positions=64))  # type: ignore[call-arg]


def _told(_rank: int, case: Experiment) -> str:
    batch = batches(case, _CPU, 0)(0)
    trainee, told = cases.assembled(case, batch.parts()[0]), _Told()
    trainee.step(batch, told)
    actions = [word for word in told.words if word not in {"-", "loss"}]
    assert told.entered == "".join(action[1] for action in actions).replace("B", "I")
    return " ".join(told.words)


TOLD = [
    # schedule | what the first rank does | what the last rank does
    (
        "gpipe",
        "0F0 - 0F1 - 0F2 - 0F3 - 0B0 0B1 0B2 0B3",
        "1F0 loss 1F1 loss 1F2 loss 1F3 loss 1B0 1B1 1B2 1B3",
    ),
    (
        "1f1b",
        "0F0 - 0F1 - 0B0 0F2 - 0B1 0F3 - 0B2 0B3",
        "1F0 loss 1B0 1F1 loss 1B1 1F2 loss 1B2 1F3 loss 1B3",
    ),
    (
        "zero_bubble",
        (
            "0F0 - 0F1 - 2F0 - 2F1 - 2I0 2W0 0F2 - 2I1 2W1 0F3 - "
            "0I0 0W0 2F2 - 0I1 0W1 2F3 - 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3"
        ),
        (
            "1F0 - 1F1 - 3F0 loss 3I0 3F1 loss 3I1 3W0 1F2 - 1I0 3W1 1F3 - 1I1 1W0 "
            "3F2 loss 3I2 1W1 3F3 loss 3I3 3W2 1I2 3W3 1I3 1W2 1W3"
        ),
    ),
]


@pytest.mark.parametrize(("schedule", "first", "last"), TOLD)
def test_a_rank_says_what_it_does(pool2: RankPool, schedule: str, first: str, last: str) -> None:
    assert pool2.run(_told, pipelined("none", schedule)) == [first, last]


def measured_in_stages(_rank: int, case: Experiment) -> tuple[StagesInFlight, int, dict[str, int]]:
    batch = batches(case, _CPU, 0)
    trainee = cases.assembled(case, batch(0).parts()[0])
    train(trainee, batch(0))
    report = instrument(trainee, batch(1))
    assert trainee.pipeline is not None
    stages = trainee.pipeline.shown(report)
    assert max(each.bytes for each in stages.actions) == report.memory.peak_bytes
    return stages, report.memory.activation_peak_bytes, report.work.recomputations


HAS_THESE_PEAKS = hasattr(schedules.PipelineScheduleSingle, "_warmup_p2p")
"""Torch 2.11 and 2.15 let go of what stages send and receive at other moments."""

MEASURED = [
    # variant | schedule | bytes that a forward leaves | highest activations | block forwards by asker
    ("none", "gpipe", (285_696, 306_320), (1_159_184, 1_241_672), [(16, 0, 0)] * 2),
    ("full", "gpipe", (40_704, 61_328), (245_520, 307_400), [(16, 16, 0)] * 2),
    # each rank as it is where both stages have its variant
    ("full/none", "gpipe", (40_704, 306_320), (245_520, 1_241_672), [(16, 16, 0), (16, 0, 0)]),
    ("none", "1f1b", (285_696, 306_320), (591_888, 322_724), [(16, 0, 0)] * 2),
    ("full", "1f1b", (40_704, 61_328), (168_208, 123_428), [(16, 16, 0)] * 2),
    # the first stage takes its backward as a whole, which counts as its weight part
    ("none", "zero_bubble", (144_896, 165_520), (694_288, 833_840), [(16, 0, 0)] * 2),
    ("full", "zero_bubble", (22_400, 43_024), (266_512, 463_408), [(16, 8, 8), (16, 16, 0)]),
    ("selective_op", "zero_bubble", (97_152, 117_776), (498_960, 629_296), [(16, 8, 8), (16, 16, 0)]),
    # of the others torch recomputes a block for the input and for each of its 9 groups of parameters
    (
        "full torch",
        "zero_bubble",
        (22_400, 43_024),
        (964_560, 1_087_712),
        [(16, 8, 8 + 9 * 8), (16, 16, 9 * 16)],
    ),
]

MORE = [
    ("full again", "zero_bubble", (22_400, 43_024), (259_280, 382_432), [(16, 8, 16), (16, 16, 16)]),
    ("selective_layer", "zero_bubble", (83_648, 104_272), (477_968, 646_192), [(16, 4, 4), (16, 8, 0)]),
    ("nested", "zero_bubble", (13_248, 33_872), (229_904, 426_800), [(16, 12, 12), (16, 24, 0)]),
    ("offload", "zero_bubble", (4_096, 28_816), (147_472, 315_696), [(16, 0, 0)] * 2),
    ("none", "zbv", (165_520, 140_800), (727_212, 725_520), [(16, 0, 0)] * 2),
    ("full", "zbv", (43_024, 18_304), (299_436, 534_928), [(16, 8, 8), (16, 16, 0)]),
    ("selective_op", "zbv", (117_776, 93_056), (531_884, 559_504), [(16, 8, 8), (16, 16, 0)]),
]


@pytest.mark.parametrize(
    ("variant", "schedule", "left", "peaks", "forwards"),
    [*MEASURED, *(pytest.param(*row, marks=pytest.mark.matrix) for row in MORE)],
)
def test_bytes_and_forwards_of_ranks(
    pool2: RankPool,
    variant: str,
    schedule: str,
    left: tuple[int, int],
    peaks: tuple[int, int],
    forwards: list[tuple[int, int, int]],
) -> None:
    found = pool2.run(measured_in_stages, pipelined(variant, schedule))
    assert tuple(stages.bytes_a_microbatch for stages, _, _ in found) == left
    if HAS_THESE_PEAKS:
        assert tuple(peak for _, peak, _ in found) == peaks
    assert [tuple(counts.values()) for _, _, counts in found] == forwards

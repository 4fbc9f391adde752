"""How long predictions of large models take, and what memory: one, those of a sweep, and those of a search.

Each case runs in a fork of this process, which has imported torch, so that imports are left out and no case
has the traces of another. Where the machine is busy, CPU seconds say more than seconds: a target is reached
where seconds are within it, or the CPU seconds of each process.

    python -m bench.prediction --part prediction_speed --points 100
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import configs
from harness.command_line.schema import experiment_fields, hardware_of, materialise
from harness.predict import prediction
from harness.sweep.predictions import answers
from harness.sweep.question import Answer, Question

_7B = "model=llama_7b hardware=h100"
_70B = (
    "model=llama_7b model.name=llama_70b model.width=8192 model.n_layers=80 model.n_heads=64 "
    "model.n_kv_heads=8 model.hidden_width=28672 hardware=h100 "
    "mesh.dp_shard=128 mesh.tp=8 batch_size=128 sequence_length=4096"
)
_VARIANTS = ("none", "full", "selective_op", "offload", "nested")
_PROCESSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is predicted.

    Fields:
        name: what the table calls it.
        points: command lines.
        target_s: seconds that it may take; a point, where `is_a_point`.
        target_bytes: resident memory that it may take.
        field: field to solve for.
        is_a_point: seconds are told for one of the points.
    """

    name: str
    points: Sequence[str]
    target_s: float
    target_bytes: int | None = None
    field: str | None = None
    is_a_point: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a case took.

    Fields:
        wall_s, cpu_s: seconds, and CPU seconds of all processes.
        processes: how many predict at the same time.
        resident_bytes: highest resident memory of one process.
        refused: why points were not predicted.
    """

    name: str
    wall_s: float
    cpu_s: float
    processes: int
    resident_bytes: int
    refused: Sequence[str]
    target_s: float
    target_bytes: int | None

    @property
    def has_reached(self) -> bool:
        """Whether it is within its targets."""
        is_small = self.target_bytes is None or self.resident_bytes <= self.target_bytes
        return (
            not self.refused and is_small and min(self.wall_s, self.cpu_s / self.processes) <= self.target_s
        )


def cases(n_points: int) -> list[Case]:
    """Return all cases, with `n_points` in each long sweep: batch sizes, and batch sizes of each variant."""
    n_batches = n_points // len(_VARIANTS)
    return [
        Case(name="7B, one GPU, ac=full", points=[f"{_7B} ac=full"], target_s=5),
        Case(
            name="70B on 1,024 ranks, ac=full", points=[f"{_70B} ac=full"], target_s=20, target_bytes=4 << 30
        ),
        Case(
            name=f"a point of {n_points} of 7B",
            points=[f"{_7B} ac=full batch_size={size}" for size in range(1, n_points + 1)],
            target_s=1.5,
            is_a_point=True,
        ),
        Case(
            name=f"a point of {len(_VARIANTS)} x {n_batches} of 7B on 8 ranks",
            points=[
                f"{_7B} mesh.dp_shard=8 ac={ac} batch_size={8 * size}"
                for ac in _VARIANTS
                for size in range(1, n_batches + 1)
            ],
            target_s=1.5,
            is_a_point=True,
        ),
        Case(
            name="solve=batch_size, 7B on 8 ranks",
            points=[f"{_7B} mesh.dp_shard=8 ac=full"],
            target_s=30,
            field="batch_size",
        ),
        Case(
            name="five variants of 7B on 8 ranks",
            points=[f"{_7B} mesh.dp_shard=8 batch_size=8 ac={ac}" for ac in _VARIANTS],
            target_s=60,
        ),
    ]


def main(words: Sequence[str]) -> int:
    """Predict, print, write; times are never a reason to fail."""
    made = parser(__doc__, "prediction_speed", "prediction")
    made.add_argument("--points", type=int, default=20, help="points of the long sweep")
    options = made.parse_args(words)
    torch.set_num_threads(1)  # forks would wait forever for other threads of this process
    prediction.predict(_questions(["model=llama_nano ac=full"])[0].experiment)  # imports what a step needs
    load_average = os.getloadavg()[0]
    costs = [_in_a_fork(case) for case in cases(options.points)]
    protocol = {"points": options.points, "processes": _PROCESSES, "load_average_before": load_average}
    publish(
        table(costs),
        options.out,
        protocol=protocol,
        results=[asdict(cost) | {"has_reached": cost.has_reached} for cost in costs],
    )
    return 0


def table(costs: Iterable[Cost]) -> Table:
    """Return a row a case, with its target."""
    return table_of(
        costs,
        {
            "predicted": "name",
            "seconds": "wall_s:.1f",
            "CPU seconds": "cpu_s:.1f",
            "at most": "target_s:g",
            "GiB": lambda cost: f"{cost.resident_bytes / (1 << 30):.2f}",
            "reached": lambda cost: "; ".join(cost.refused) or ("yes" if cost.has_reached else "no"),
        },
        title="What predictions take, beyond imports",
        caption=f"{_PROCESSES} processes where there are several points",
    )


def cost_of(case: Case, predict: Callable[[Sequence[Question]], Sequence[Answer]]) -> Cost:
    """Return what a case takes in this process and its children.

    Args:
        case: what to predict.
        predict: returns the answers to questions.
    """
    asked = _questions(case.points, case.field)
    started_s, started_cpu_s = time.perf_counter(), _cpu_s()
    found = predict(asked)
    share = len(asked) if case.is_a_point else 1
    return Cost(
        name=case.name,
        wall_s=(time.perf_counter() - started_s) / share,
        cpu_s=(_cpu_s() - started_cpu_s) / share,
        processes=min(len(asked), _PROCESSES),
        resident_bytes=1024 * max(each.ru_maxrss for each in _used()),
        refused=[str(each.refusal) for each in found if each.refusal is not None],
        target_s=case.target_s,
        target_bytes=case.target_bytes,
    )


def _in_a_fork(case: Case) -> Cost:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    predict = partial(answers, processes=_PROCESSES)
    process = context.Process(target=lambda: theirs.send(cost_of(case, predict)))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert isinstance(found, Cost)
    return found


def _questions(points: Sequence[str], field: str | None = None) -> list[Question]:
    return [
        Question(
            experiment=materialise(experiment_fields(config)),
            label=point,
            hardware=hardware_of(config),
            field=field,
        )
        for point, config in zip(
            points, configs(["mesh.device=cpu", *point.split()] for point in points), strict=True
        )
    ]


def _used() -> list[resource.struct_rusage]:
    """Return what this process has used, and its children."""
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def _cpu_s() -> float:
    return sum(each.ru_utime + each.ru_stime for each in _used())

"""Models of other people under a chunk plan for half of their bytes, compared with the plain model.

Each architecture is small, with random weights, and trained for a step (`--forward`: a forward without
gradients). A plan for half of its activations is sought, applied to a copy and run, in a process of its own
with a limit of CPU time. Bytes are those of the project's meter. Libraries that are not installed are said,
and left out.

    python -m pip install transformers timm torchvision diffusers
    python -m bench.chunking --part third_party [--forward] [--matching Llama] [--fraction 0.5] [--resume]
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.architectures import LIBRARIES, library_of, makers, missing_libraries
from bench.chunking.chunk_attempt import PlannedPass
from bench.output import keep, parser, publish
from bench.table import table_of
from harness.measure.environment import describe
from strategies.base import PlannedStep, StrategyError
from strategies.chunk.planning.chunk_plan import ChunkPlanner

TOLERANCE = 1e-3
"""Relative difference that a chunk variant declares."""

NEARLY = 0.01
"""Share by which a prediction may differ from what is measured."""

_LIMIT_S = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What became of one architecture.

    Fields:
        outcome: `planned`, `refused` by name, `too slow`, or `crashed`.
        sentence: of a refusal or a crash.
        unchunked_bytes: measured activation peak as it is.
        predicted_share, measured_share: of that, under the plan.
        relative_difference: of the results, as `bench.chunking` has it.
    """

    architecture: str
    outcome: str
    sentence: str = ""
    fraction: float
    unchunked_bytes: int | None = None
    predicted_share: float | None = None
    measured_share: float | None = None
    relative_difference: float | None = None
    planning_s: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the measured bytes are within the budget and nearly those that were predicted."""
        if self.measured_share is None or self.predicted_share is None:
            return True
        is_near = abs(self.predicted_share - self.measured_share) <= NEARLY * self.measured_share
        return self.measured_share <= self.fraction and is_near

    @property
    def is_equal(self) -> bool:
        """Whether the results are those of the plain model."""
        difference = self.relative_difference
        return self.outcome != "planned" or (difference is not None and difference <= TOLERANCE)

    @property
    def is_right(self) -> bool:
        """Whether it is planned as claimed, or refused."""
        return self.outcome in {"planned", "refused"} and self.is_kept and self.is_equal


def main(words: Sequence[str]) -> int:
    """Plan all architectures, print the table, write the JSON; return 1 where one is not right."""
    made = parser(__doc__, "third_party", "chunking")
    made.add_argument("--forward", action="store_true", help="plan a forward without gradients")
    made.add_argument("--matching", default="", help="only architectures whose name contains this")
    made.add_argument("--fraction", type=float, default=0.5, help="budget / bytes as it is")
    made.add_argument("--limit", type=int, default=_LIMIT_S, help="CPU seconds that an architecture may take")
    made.add_argument("--resume", action="store_true", help="keep what the JSON file has of the same sources")
    chosen = made.parse_args(words)
    torch.set_num_threads(1)
    missing, training = missing_libraries(), not chosen.forward
    names = [name for name in makers() if library_of(name) not in missing and chosen.matching in name]
    versions = {each: "not installed" if each in missing else _version(each) for each in LIBRARIES}
    how = {"fraction": chosen.fraction, "training": training, "tolerance": TOLERANCE, "limit_s": chosen.limit}
    protocol = {"architectures": names, "libraries": versions, **how}
    rows = _earlier(chosen.out, how) if chosen.resume else {}
    for name in names:
        if name not in rows:
            importlib.import_module(library_of(name))  # once, for the processes of all its architectures
            row = Planned(architecture=name, outcome="refused", fraction=chosen.fraction)
            rows[name] = in_time(row, partial(planned, training=training), limit_s=chosen.limit)
            sys.stderr.write(f"{_line(rows[name])}\n")
            keep(chosen.out, protocol=protocol, results=[asdict(each) for each in rows.values()])
    ordered = [rows[name] for name in names]
    publish(
        Group(_table(ordered), _counts(ordered), ", ".join(map(" ".join, versions.items()))),
        chosen.out,
        protocol=protocol,
        results=[asdict(row) for row in ordered],
    )
    return int(not all(row.is_right for row in ordered))


def _version(library: str) -> str:
    """Return the version of a library, and what is missing of it."""
    version = metadata.version(library)
    if library == "torchvision" and not importlib.import_module("torchvision.extension")._has_ops():  # noqa: SLF001
        return f"{version}, without its compiled operators"
    return version


def _earlier(path: Path, how: Mapping[str, Any]) -> dict[str, Planned]:
    """Return the rows of a file by architecture, none where it was made otherwise or by other sources."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    digest = describe("cpu")["source_digest"]
    is_alike = how.items() <= content["protocol"].items()
    if not is_alike or content["environment"]["source_digest"] != digest:
        return {}
    return {each["architecture"]: Planned(**each) for each in content["results"]}


def in_time(row: Planned, run: Callable[[Planned], Planned], *, limit_s: int) -> Planned:
    """Return what `run` makes of a row in a process of its own; `too slow` after `limit_s` CPU seconds."""
    forking = multiprocessing.get_context("fork")
    here, there = forking.Pipe(duplex=False)
    process = forking.Process(target=_answer, args=(there, row, run, limit_s))
    process.start()
    there.close()
    try:
        found: Planned | None = here.recv()
    except EOFError:
        found = None
    process.join()
    if found is not None:
        return found
    if process.exitcode == -signal.SIGXCPU:
        return replace(row, outcome="too slow", sentence=f"more than {limit_s} CPU seconds")
    return replace(row, outcome="crashed", sentence=f"the process ended with {process.exitcode}")


def _answer(there: Connection, row: Planned, run: Callable[[Planned], Planned], limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    there.send(run(row))


def planned(row: Planned, *, training: bool) -> Planned:
    """Return a row with what becomes of its architecture."""
    try:
        return _attempt(row, training=training)
    except StrategyError as refusal:
        return replace(row, sentence=str(refusal))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return replace(row, outcome="crashed", sentence=f"{type(error).__name__}: {error}")


def _attempt(row: Planned, *, training: bool) -> Planned:
    model, batch = makers()[row.architecture]()
    step = PlannedStep(loss=_loss) if training else None
    case = PlannedPass.of(model.train(training), batch, step)
    started_s = time.perf_counter()
    planning = case.planning()
    fields, chunked = case.attempt(planning, row.fraction, started_s=started_s, is_timed=False)
    unchunked = fields["unchunked_bytes"]
    if chunked is None:
        share = fields["minimum_bytes"] / unchunked
        said = f"the smallest peak is {share:.0%} of it: {_refusal(planning, int(unchunked * row.fraction))}"
        return replace(row, unchunked_bytes=unchunked, sentence=said)
    return replace(
        row,
        outcome="planned",
        unchunked_bytes=unchunked,
        predicted_share=fields["predicted_bytes"] / unchunked,
        measured_share=fields["measured_bytes"] / unchunked,
        relative_difference=fields["relative_difference"],
        planning_s=fields["planning_s"],
    )


def _refusal(planning: ChunkPlanner, budget_bytes: int) -> str:
    """Return why no plan keeps a budget, which the planner has refused before."""
    try:
        planning.plan(budget_bytes)
    except StrategyError as refusal:
        return str(refusal)
    raise AssertionError


def _loss(outputs: Any) -> Tensor:
    parts = [leaf.square().mean() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack(parts).sum()


def _line(row: Planned) -> str:
    said = "" if row.measured_share is None else f", {row.measured_share:.1%} in {row.planning_s:.1f} s"
    wrong = "" if row.is_right else " (not right)"
    return f"{row.architecture}: {row.outcome}{said}{wrong} {row.sentence}".rstrip()


def _counts(rows: Sequence[Planned]) -> str:
    """Return how many rows are planned of each library."""
    of = {name: [row for row in rows if library_of(row.architecture) == name] for name in LIBRARIES}
    parts = [
        f"{sum(row.outcome == 'planned' and row.is_right for row in each)} of {len(each)} of {name}"
        for name, each in {"all": rows, **of}.items()
    ]
    return f"planned as claimed: {', '.join(parts)}"


def _table(rows: list[Planned]) -> Table:
    return table_of(
        rows,
        {
            "architecture": "architecture",
            "outcome": "outcome",
            "bytes as it is": "unchunked_bytes:,",
            "predicted": "predicted_share:.1%",
            "measured": "measured_share:.1%",
            "kept": lambda row: "yes" if row.is_kept else "no",
            "difference": "relative_difference:.1e",
            "equal": lambda row: "yes" if row.is_equal else "no",
            "planned in, s": "planning_s:.1f",
            "sentence": lambda row: row.sentence[-120:],
        },
    )

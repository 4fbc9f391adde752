"""Models of other people under a chunk plan for half of their bytes, compared with the plain model.

Each architecture is small, with random weights, and trained for a step (`--forward`: a forward without
gradients). A plan for half of its activations is sought, applied to a copy and run. Bytes are those of the
project's meter. Libraries that are not installed are said, and left out.

    python -m bench.third_party [--forward] [--matching Llama] [--fraction 0.5]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.architectures import library_of, makers, missing_libraries
from bench.chunk_attempt import PlannedPass
from bench.output import parser, publish
from bench.table import table_of
from strategies.base import PlannedStep
from strategies.errors import StrategyError

TOLERANCE = 1e-3
"""Relative difference that a chunk variant declares."""

NEARLY = 0.01
"""Share by which a prediction may differ from what is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What became of one architecture.

    Fields:
        outcome: `planned`, `refused` by name, or `crashed`.
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
        return self.outcome != "crashed" and self.is_kept and self.is_equal


def main() -> int:
    """Plan all architectures, print the table, write the JSON; return 1 where one is not right."""
    made = parser(__doc__, "third_party")
    made.add_argument("--forward", action="store_true", help="plan a forward without gradients")
    made.add_argument("--matching", default="", help="only architectures whose name contains this")
    made.add_argument("--fraction", type=float, default=0.5, help="budget / bytes as it is")
    chosen = made.parse_args()
    torch.set_num_threads(1)
    missing = missing_libraries()
    found = [name for name in makers() if library_of(name) not in missing]
    names = [name for name in found if chosen.matching in name]
    rows = list(planned(names, fraction=chosen.fraction, training=not chosen.forward))
    publish(
        Group(_table(rows), f"planned: {sum(row.outcome == 'planned' for row in rows)} of {len(rows)}",
              f"not installed: {', '.join(missing) or 'none'}"),
        chosen.out,
        protocol={
            "architectures": names,
            "fraction": chosen.fraction,
            "training": not chosen.forward,
            "tolerance": TOLERANCE,
            "missing": missing,
        },
        results=[asdict(row) for row in rows],
    )  # fmt: skip
    return int(not all(row.is_right for row in rows))


def planned(names: Sequence[str], *, fraction: float, training: bool) -> Iterator[Planned]:
    """Yield what becomes of each architecture."""
    for name in names:
        row = Planned(architecture=name, outcome="refused", fraction=fraction)
        try:
            yield _attempt(row, training=training)
        except StrategyError as refusal:
            yield replace(row, sentence=str(refusal))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            yield replace(row, outcome="crashed", sentence=f"{type(error).__name__}: {error}")


def _attempt(row: Planned, *, training: bool) -> Planned:
    model, batch = makers()[row.architecture]()
    step = PlannedStep(loss=_loss) if training else None
    case = PlannedPass.of(model.train(training), batch, step)
    started_s = time.perf_counter()
    fields, chunked = case.attempt(case.planning(), row.fraction, started_s=started_s, is_timed=False)
    unchunked = fields["unchunked_bytes"]
    if chunked is None:
        share = fields["minimum_bytes"] / unchunked
        return replace(row, unchunked_bytes=unchunked, sentence=f"the smallest peak is {share:.0%} of it")
    return replace(
        row,
        outcome="planned",
        unchunked_bytes=unchunked,
        predicted_share=fields["predicted_bytes"] / unchunked,
        measured_share=fields["measured_bytes"] / unchunked,
        relative_difference=fields["relative_difference"],
        planning_s=fields["planning_s"],
    )


def _loss(outputs: Any) -> Tensor:
    parts = [leaf.square().mean() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack(parts).sum()


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
            "sentence": lambda row: row.sentence[:120],
        },
    )


if __name__ == "__main__":
    sys.exit(main())

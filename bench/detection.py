"""Five silent defects and their controls, each a trial: what is equal, and the verdict.

Outputs and loss are right in all of them, or at first; gradients, buffers or operator counts are not.

    python -m bench.detection
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, experiments, records
from harness.experiment.experiment import Experiment
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.parity_result import PARTS
from harness.records.record import Record
from strategies import Strategy
from tests.gallery.users.detected import SavesMutableMatmuls

PROTOCOL = ("model=python", "model.layers_fqn=layers", "protocol=parity", "protocol.parity_steps=1")
MUTABLE: Mapping[str, Strategy] = {"saves_mutable_matmuls": SavesMutableMatmuls()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One trial.

    Fields:
        name: the defect, or what the control does instead.
        factory: function of `tests.gallery.users.detected`.
        ac: overrides of the variant, or the name of one in `MUTABLE`.
        expected: the verdict it must get.
        differs: the parts that must differ after one step.
    """

    name: str
    factory: str
    ac: tuple[str, ...]
    expected: str
    differs: frozenset[str] = frozenset()


_FULL = ("ac=full",)
_SAVING_MM = ("ac=selective_op", "ac.save_ops=[aten.mm.default]")
_MUTABLE = ("saves_mutable_matmuls",)
_GRADIENTS = frozenset({"gradients", "parameters"})
CASES = (
    Case(
        name="dropout drawn anew in recomputation",
        factory="dropping",
        ac=("ac=full", "ac.preserve_rng_state=false"),
        expected="differs",
        differs=_GRADIENTS | {"rng_state"},
    ),
    Case(name="  control: RNG state preserved", factory="dropping", ac=_FULL, expected="neutral"),
    Case(
        name="region depends on a call counter",
        factory="counter_read",
        ac=_FULL,
        expected="differs",
        differs=_GRADIENTS | {"state"},
    ),
    Case(
        name="counter that nothing reads, counted twice",
        factory="counter_unread",
        ac=_FULL,
        expected="differs",
        differs=frozenset({"state"}),
    ),
    Case(
        name="saved matmul changed in place",
        factory="in_place",
        ac=_MUTABLE,
        expected="differs",
        differs=_GRADIENTS,
    ),
    Case(name="  control: changed out of place", factory="out_of_place", ac=_MUTABLE, expected="neutral"),
    Case(
        name="batch statistics updated twice",
        factory="moving_statistics",
        ac=_FULL,
        expected="differs",
        differs=frozenset({"buffers"}),
    ),
    Case(name="  control: statistics frozen", factory="frozen_statistics", ac=_FULL, expected="neutral"),
    Case(name="save list that never matches", factory="biased", ac=_SAVING_MM, expected="inert"),
    Case(name="  control: save list that matches", factory="unbiased", ac=_SAVING_MM, expected="neutral"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What the record of a case says.

    Fields:
        equal: by part of the step; empty when the trial did not get so far.
        first_difference: the first in time, in words.
        is_right: verdict and parts are the expected ones.
    """

    case: str
    equal: dict[str, bool]
    verdict: str
    expected: str
    first_difference: str | None
    is_right: bool


def main() -> int:
    """Run every case, print the table, write the JSON; return 1 if a verdict is wrong."""
    arguments = _arguments()
    chosen = _experiments(arguments.device)
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        found = records(agent, chosen, Path(folder))
    rows = [_row(case, record) for case, record in zip(CASES, found, strict=True)]
    protocol = {"overrides": PROTOCOL, "cases": [f"{case.factory} {' '.join(case.ac)}" for case in CASES]}
    results = [asdict(row) for row in rows]
    publish(_table(rows), arguments.out, protocol=protocol, results=results, device=arguments.device)
    return int(not all(row.is_right for row in rows))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "detection")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return made.parse_args()


def _experiments(device: str) -> list[Experiment]:
    common = [*PROTOCOL, f"mesh.device={device}"]
    points = [
        [
            *common,
            f"model.factory=tests.gallery.users.detected:{case.factory}",
            *(() if case.ac == _MUTABLE else case.ac),
        ]
        for case in CASES
    ]
    return [
        dataclasses.replace(each, ac=MUTABLE[case.ac[0]]) if case.ac == _MUTABLE else each
        for case, each in zip(CASES, experiments(points), strict=True)
    ]


def _row(case: Case, record: Record) -> CaseResult:
    parts: dict[str, Any] = {} if record.parity is None else {p: getattr(record.parity, p) for p in PARTS}
    different = [part for part, found in parts.items() if not found.equal]
    first = None if record.parity is None or record.parity.first is None else str(record.parity.first)
    return CaseResult(
        case=case.name.strip(),
        equal={part: found.equal for part, found in parts.items()},
        verdict=record.verdict,
        expected=case.expected,
        first_difference=first if record.error is None else record.error.message,
        is_right=bool(parts) and record.verdict == case.expected and set(different) == case.differs,
    )


def _table(rows: list[CaseResult]) -> Table:
    def equality(part: str) -> Column:
        return lambda row: "-" if part not in row.equal else "equal" if row.equal[part] else "DIFFER"

    return table_of(
        rows,
        {
            "trial": "case",
            **{part: equality(part) for part in ("outputs", "loss", "gradients", "buffers")},
            "verdict": "verdict",
            "expected": "expected",
            "": lambda row: "right" if row.is_right else "WRONG",
        },
        title="Silent defects after one step, each with a control",
    )


if __name__ == "__main__":
    sys.exit(main())

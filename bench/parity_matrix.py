"""The parity matrix: every AC variant on every model, mesh and dropout, each with its whole verdict.

Each case trains variant and twin three optimizer steps and compares outputs, loss, gradients, buffers, RNG
state and parameters bit for bit, on every rank. A case counts when all are equal and the verdict is
`neutral`, so a strategy that did nothing counts against it too.

    python -m bench.parity_matrix --meshes single shard2 --models gpt_nano
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, UNBUDGETED, experiments, records
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record

MODELS = ("gpt_nano", "llama_nano", "moe_nano", "mlp")
MESHES = ("single", "ddp2", "shard2", "tp2", "shard2_tp2", "hsdp2x2")
DROPOUTS = (0.0, 0.1)
SIZES = (
    "model.n_layers=2",
    "model.width=32",
    "model.hidden_width=64",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=16",
    "protocol=parity",
    "protocol.parity_steps=3",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case of the matrix; two of them never share a record."""

    model: str
    mesh: str
    ac: str
    dropout: float

    @property
    def overrides(self) -> list[str]:
        """The command line of the case."""
        chosen = (
            f"model={self.model}",
            f"mesh={self.mesh}",
            f"ac={self.ac}",
            f"model.dropout={self.dropout}",
        )
        return [*chosen, *SIZES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """How a case ended: bitwise equal and neutral, or `problem` says what is not."""

    case: Case
    status: str
    verdict: str
    problem: str | None


def main() -> int:
    """Run the matrix, print the grid and every problem, write the JSON; return 1 if there is a problem."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        findings = [
            finding
            for mesh in arguments.meshes
            for finding in _findings(agent, _cases(arguments, mesh), arguments.device, Path(folder, mesh))
        ]
    problems = [finding for finding in findings if finding.problem is not None]
    publish(
        _grid(findings, arguments.meshes),
        arguments.out,
        protocol={
            "overrides": SIZES,
            "models": arguments.models,
            "meshes": arguments.meshes,
            "dropouts": DROPOUTS,
        },
        results=[_as_json(finding) for finding in findings],
        device=arguments.device,
    )
    for finding in problems:
        print(f"{finding.case}: {finding.problem}")
    print(f"bitwise and neutral: {len(findings) - len(problems)} of {len(findings)}")
    return int(bool(problems))


def problem(record: Record) -> str | None:
    """Say what keeps a case from counting; `None` when it is bitwise equal to its twin and neutral."""
    if record.error is not None:
        return f"{record.status}: {record.error.message}"
    if record.parity is None:
        return "nothing was compared"
    if record.parity.first is not None:
        return str(record.parity.first)
    if record.parity.level != "bitwise" or record.verdict != "neutral":
        return f"{record.verdict}, compared by {record.parity.level}"
    return None


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "parity_matrix")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--meshes", nargs="+", default=MESHES)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return made.parse_args()


def _cases(arguments: argparse.Namespace, mesh: str) -> list[Case]:
    points = product(arguments.models, UNBUDGETED, DROPOUTS)
    return [Case(model=model, mesh=mesh, ac=ac, dropout=dropout) for model, ac, dropout in points]


def _findings(agent: Agent, cases: Sequence[Case], device: str, trial_dir: Path) -> list[Finding]:
    chosen = experiments([*case.overrides, f"mesh.device={device}"] for case in cases)
    found = records(agent, chosen, trial_dir)
    return [
        Finding(case=case, status=record.status, verdict=record.verdict, problem=problem(record))
        for case, record in zip(cases, found, strict=True)
    ]


def _grid(findings: Sequence[Finding], meshes: Sequence[str]) -> Table:
    def cell(mesh: str) -> Column:
        def text(ac: str) -> str:
            cases = [each for each in findings if (each.case.ac, each.case.mesh) == (ac, mesh)]
            return f"{sum(each.problem is None for each in cases)} / {len(cases)}"

        return text

    columns: dict[str, Column] = {"variant": str, **{mesh: cell(mesh) for mesh in meshes}}
    return table_of(UNBUDGETED, columns, title="Cases bitwise neutral / all")


def _as_json(finding: Finding) -> dict[str, Any]:
    case = {name: getattr(finding.case, name) for name in ("model", "mesh", "ac", "dropout")}
    return case | {"status": finding.status, "verdict": finding.verdict, "problem": finding.problem}


if __name__ == "__main__":
    sys.exit(main())

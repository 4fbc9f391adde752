"""What is predicted of a step against what is measured of it, on the parity matrix: worst first.

A prediction runs the code of the trial on fake tensors and fake ranks; nothing of it is fitted. Each trial is
predicted first and measured after, in ranks of its own. A prediction that assumes something of the data, as
of experts, is an estimate: its error is shown, and is no mismatch. `error` is the largest relative error of a
quantity; counts by name (recomputed operators, collectives) are equal or not.

    python -m bench.prediction --meshes single shard2 --models gpt_nano
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from bench.output import parser, publish
from bench.parity_matrix import MESHES, SIZES
from bench.table import table_of
from bench.trials import PRELOAD, UNBUDGETED, experiments, records
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.prediction import predict
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record
from strategies import StrategyError

MODELS = ("gpt_nano", "llama_nano", "mlp", "moe_nano")
CHUNKS = ("none", "budget")
COMPILERS = ("none", "aot_eager")
_BYTES = (
    "peak_bytes", "saved_bytes", "activation_peak_bytes", "parameter_bytes", "gradient_bytes",
    "optimizer_bytes", "host_peak_bytes",
)  # fmt: skip
_WORK = ("forward_flops", "backward_flops", "recomputed_flops", "offloaded_bytes", "chunks")
Refusal: TypeAlias = ConfigError | StrategyError
_VIEWS = "recomputed_ops"
_COUNTS = (_VIEWS, "collectives", "collective_bytes", "calls")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One trial; two of them never share a record."""

    model: str
    mesh: str
    ac: str
    chunk: str
    compile: str = "none"

    @property
    def overrides(self) -> list[str]:
        """The command line of the case."""
        chosen = [f"{group}={getattr(self, group)}" for group in ("model", "mesh", "ac", "chunk", "compile")]
        budget = ["chunk.fraction=0.7"] if self.chunk == "budget" else []
        return [*chosen, *SIZES, *budget, "mesh.device=cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """How far the prediction of a case is from its measurement.

    Fields:
        error: largest relative error of bytes and FLOPs; `None` where there is no prediction, or both refuse.
        wrong: quantities that differ, with both values.
        predict_s: seconds that the prediction of variant and twin took.
        assumes: what the prediction assumes; it is an estimate where it assumes anything.
        problem: why there is no prediction or no measurement.
    """

    case: Case
    error: float | None
    wrong: dict[str, list[Any]]
    predict_s: float
    problem: str | None = None
    assumes: tuple[str, ...] = ()


def main() -> int:
    """Predict, measure, print, write the JSON; return 1 if a number differs or is not predicted.

    Loops of chunks make other views than those of a prediction: they cost nothing and are shown.
    """
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        findings = [
            finding
            for mesh in arguments.meshes
            for finding in _findings(agent, _cases(arguments, mesh), Path(folder, mesh))
        ]
    worst_first = sorted(
        findings, key=lambda each: (each.problem is None, -(each.error or 0), not each.wrong)
    )
    publish(
        _table(worst_first[: arguments.most]),
        arguments.out,
        protocol={name: getattr(arguments, name) for name in ("models", "meshes", "acs", "chunks", "compile")}
        | {"overrides": SIZES},
        results=[asdict(finding) for finding in worst_first],
    )
    exact = sum(not (each.wrong or each.problem) for each in findings)
    print(f"exact in all quantities: {exact} of {len(findings)}")
    estimates = [each.error or 0.0 for each in findings if each.assumes]
    if estimates:
        print(f"estimates: {len(estimates)}, the worst error {max(estimates):.3%}")
    return int(any(map(_is_wrong, findings)))


def _is_wrong(found: Finding) -> bool:
    return bool(found.problem or (found.wrong.keys() - {_VIEWS} and not found.assumes))


def differences(predicted: Record, measured: Record) -> tuple[float, dict[str, list[Any]]]:
    """Return the largest relative error, and the quantities that differ, each as predicted and measured."""
    pairs = dict(_pairs(predicted, measured))
    wrong = {name: list(pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    numbers = [pair for pair in wrong.values() if isinstance(pair[0], int)]
    return max((abs(one - other) / max(other, 1) for one, other in numbers), default=0.0), wrong


def _pairs(predicted: Record, measured: Record) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for part, names in (("memory", _BYTES), ("work", (*_WORK, *_COUNTS))):
        one, other = getattr(predicted, part), getattr(measured, part)
        for name in names:
            yield name, (getattr(one, name), getattr(other, name))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "prediction")
    made.add_argument("--models", nargs="+", default=MODELS)
    made.add_argument("--meshes", nargs="+", default=MESHES)
    made.add_argument("--acs", nargs="+", default=UNBUDGETED)
    made.add_argument("--chunks", nargs="+", choices=CHUNKS, default=CHUNKS)
    made.add_argument("--compile", nargs="+", choices=COMPILERS, default=COMPILERS, help="without chunks")
    made.add_argument("--most", type=int, default=30, help="rows of the table")
    return made.parse_args()


def _cases(arguments: argparse.Namespace, mesh: str) -> list[Case]:
    """Return the cases of a mesh; chunks are on one rank alone."""
    chunks = [each for each in arguments.chunks if each == "none" or mesh == "single"]
    points = product(arguments.models, arguments.acs, chunks, arguments.compile)
    return [
        Case(model=model, mesh=mesh, ac=ac, chunk=chunk, compile=compiler)
        for model, ac, chunk, compiler in points
        if "none" in (chunk, compiler)
    ]


def _findings(agent: Agent, cases: Sequence[Case], trial_dir: Path) -> list[Finding]:
    chosen = experiments(case.overrides for case in cases)
    predictions = [_predicted(experiment) for experiment in chosen]
    measured = records(agent, chosen, trial_dir)
    return [_finding(*each) for each in zip(cases, predictions, measured, strict=True)]


def _predicted(experiment: Experiment) -> tuple[Record | Refusal, float]:
    started_s = time.perf_counter()
    try:
        found: Record | Refusal = predict(experiment)
    except (ConfigError, StrategyError) as error:
        found = error
    return found, time.perf_counter() - started_s


def _finding(case: Case, prediction: tuple[Record | Refusal, float], measured: Record) -> Finding:
    predicted, predict_s = prediction
    if isinstance(predicted, Refusal) and measured.status == "refused":
        return Finding(case=case, error=None, wrong={}, predict_s=predict_s)
    if isinstance(predicted, Refusal) or measured.memory is None:
        said = str(predicted) if isinstance(predicted, Refusal) else f"{measured.status}: {measured.error}"
        return Finding(case=case, error=None, wrong={}, predict_s=predict_s, problem=said)
    error, wrong = differences(predicted, measured)
    return Finding(case=case, error=error, wrong=wrong, predict_s=predict_s, assumes=predicted.assumes)


def _mark(found: Finding) -> str:
    return " (estimate)" if found.assumes else ""


def _table(findings: Sequence[Finding]) -> Table:
    return table_of(
        findings,
        {
            "model": lambda row: row.case.model,
            "mesh": lambda row: row.case.mesh,
            "ac": lambda row: row.case.ac,
            "chunk": lambda row: row.case.chunk,
            "compile": lambda row: row.case.compile,
            "largest error": "error:.3%",
            "differs": lambda row: row.problem or f"{', '.join(row.wrong) or 'nothing'}{_mark(row)}",
            "predicted in": "predict_s:.1f",
        },
        title="Predicted against measured, worst first",
        caption="seconds for variant and twin",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Predictions of models that no test uses, written down first and measured after, beside other estimators.

`bench.holdout_points` has two sets of models, each with several variants, on one rank and on two. The file of
a set has the predictions before anything is measured, and is never corrected: a cause that is mended gets a
file of its own. A run of some models leaves what the file has of others. A prediction that assumes something
of the data is an estimate, and its error counts as that.

Formulas say what they say of one rank of a decoder, with the variants that they are made for. MemTracker of
torch follows every point of one rank but offloading, whose host memory is its device's on a CPU.

    PYTHONPATH=$PWD:<timm>:<fitcheck-llm> python -m bench.prediction_holdout
    PYTHONPATH=$PWD:<fitcheck-llm> python -m bench.prediction_holdout --set second
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import memory_peers
from bench.holdout_points import (
    DECODERS,
    FIRST,
    SECOND,
    VOCABULARY,
    Point,
    is_decoder,
    points_of,
)
from bench.output import keep, parser
from bench.prediction import differences
from bench.table import table_of
from bench.trials import PRELOAD, experiments, records
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.prediction import predict
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record
from strategies import StrategyError

_WIDTH = 190
SETS = {"first": FIRST, "second": SECOND}
"""Models of each set."""

MOST_ERROR = 0.01
"""Target: the largest error of peak bytes."""

Refusal = ConfigError | StrategyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A point: what was predicted, what was measured, what others say.

    Fields:
        predicted: bytes and FLOPs; `None` where the prediction was refused.
        measured: the same; `None` before it was measured, and where the trial did not end well.
        error: relative error of the peak; `None` without both.
        largest_error: the largest of all quantities.
        wrong: quantities that differ, as predicted and as measured.
        peers: peak bytes by estimator; words where it fails.
        problem: why a number is missing.
        assumes: what the prediction assumes; it is an estimate where it assumes anything.
    """

    point: Point
    predicted: dict[str, int] | None
    measured: dict[str, int] | None = None
    error: float | None = None
    largest_error: float | None = None
    wrong: dict[str, list[Any]] = field(default_factory=dict)
    peers: dict[str, int | str] = field(default_factory=dict)
    problem: str | None = None
    assumes: tuple[str, ...] = ()


def main() -> int:
    """Predict all, write the file, measure all, write it again and print it; return 1 beyond the target."""
    made = parser(__doc__, "prediction_holdout")
    made.add_argument("--set", choices=SETS, default="first")
    made.add_argument("--models", nargs="+", help="those of the set; xcit crashes")
    arguments = made.parse_args()
    warnings.simplefilter("ignore")
    models = arguments.models or SETS[arguments.set]
    points = list(points_of(models))
    chosen = experiments(point.overrides for point in points)
    predictions = [_predicted(experiment) for experiment in chosen]
    before = [_finding(point, said, None) for point, said in zip(points, predictions, strict=True)]
    others = _found_before(arguments.out, models)
    _keep(arguments.out, [*before, *others])
    measured = _measured(points, chosen)
    found = [
        _finding(point, said, record, _peers(point, experiment, said))
        for point, said, record, experiment in zip(points, predictions, measured, chosen, strict=True)
    ]
    Console(width=_WIDTH).print(_table(_worst_first(found)))
    summary = _keep(arguments.out, [*found, *others])
    print(f"{summary}\n{arguments.out}")
    return int(summary["worst_error"] > MOST_ERROR or summary["problems"] > 0)


def _found_before(path: Path, models: Sequence[str]) -> list[Finding]:
    """Return what the file has of other models."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"results": {"findings": []}}
    return [
        Finding(**each | {"point": Point(**each["point"])})
        for each in content["results"]["findings"]
        if each["point"]["model"] not in models
    ]


def _keep(path: Path, found: Sequence[Finding]) -> dict[str, Any]:
    """Write all findings, the worst first, and return what they come to."""
    measured = [each for each in found if each.error is not None]
    exact, estimates = (
        [each.error or 0.0 for each in measured if bool(each.assumes) is assumes] for assumes in (False, True)
    )
    summary: dict[str, Any] = {
        "worst_error": max(exact, default=0.0),
        "worst_estimate": max(estimates, default=0.0),
        "estimates": len(estimates),
        "points": len(found),
        "exact": sum(not each.wrong for each in measured),
        "problems": sum(each.problem is not None for each in found),
        "others": _worst_of_peers(found),
    }
    keep(
        path,
        protocol={"points": "bench/holdout_points.py"},
        results=summary | {"findings": [asdict(each) for each in _worst_first(found)]},
    )
    return summary


def _worst_first(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda each: (each.problem is None, -(each.largest_error or 0)))


def _predicted(experiment: Experiment) -> Record | Refusal:
    try:
        return predict(experiment)
    except (ConfigError, StrategyError) as error:
        return error


def _measured(points: Sequence[Point], chosen: Sequence[Experiment]) -> list[Record]:
    """Return the record of each point; those of one mesh and kind of model share ranks."""
    found: dict[int, Record] = {}

    def kind(index: int) -> tuple[str, bool]:
        return points[index].mesh, is_decoder(points[index])

    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        for key, group in groupby(sorted(range(len(points)), key=kind), key=kind):
            indices = list(group)
            made = records(agent, [chosen[index] for index in indices], Path(folder, *map(str, key)))
            found |= dict(zip(indices, made, strict=True))
    return [found[index] for index in range(len(points))]


def _finding(
    point: Point,
    predicted: Record | Refusal,
    measured: Record | None,
    peers: Mapping[str, int | str] | None = None,
) -> Finding:
    if isinstance(predicted, Refusal):
        return Finding(point=point, predicted=None, problem=str(predicted))
    numbers = _numbers(predicted)
    if measured is None:
        return Finding(point=point, predicted=numbers, assumes=predicted.assumes)
    if measured.memory is None:
        return Finding(point=point, predicted=numbers, problem=f"{measured.status}: {measured.error}")
    largest, wrong = differences(predicted, measured)
    real = _numbers(measured)
    return Finding(
        point=point,
        predicted=numbers,
        measured=real,
        error=abs(numbers["peak_bytes"] / real["peak_bytes"] - 1),
        largest_error=largest,
        wrong=wrong,
        peers=dict(peers or {}),
        assumes=predicted.assumes,
    )


def _numbers(record: Record) -> dict[str, int]:
    assert record.memory is not None
    assert record.work is not None
    memory, work = record.memory, record.work
    return {
        "peak_bytes": memory.peak_bytes,
        "saved_bytes": memory.saved_bytes,
        "forward_flops": work.forward_flops,
        "backward_flops": work.backward_flops,
        "collectives": sum(number for by in work.collectives.values() for number in by.values()),
    }


def _peers(point: Point, experiment: Experiment, predicted: Record | Refusal) -> dict[str, int | str]:
    """Return what the others say of a point of one rank."""
    if (
        point.mesh != "single"
        or point.compile != "none"
        or isinstance(predicted, Refusal)
        or predicted.trained is None
    ):
        return {}
    found: dict[str, int | str] = {}
    for name, (formula, acs) in memory_peers.FORMULAS.items():
        if is_decoder(point) and point.ac in acs:
            try:
                found[name] = formula(_sizes(point, sum(predicted.trained.elements.values())))
            except ImportError as error:
                found[name] = f"not installed: {error}"
    if point.ac == "offload":
        return found
    try:
        found["MemTracker"] = memory_peers.mem_tracker(experiment)
    except Exception as error:  # noqa: BLE001 (what it cannot follow is its result)
        found["MemTracker"] = f"{type(error).__name__}: {error}"
    return found


def _sizes(point: Point, parameters: int) -> memory_peers.Sizes:
    decoder = DECODERS[point.model]
    return memory_peers.Sizes(
        parameters=parameters,
        layers=decoder.sizes["n_layers"],
        width=decoder.sizes["width"],
        heads=decoder.sizes["n_heads"],
        hidden_width=decoder.hidden_width,
        vocab_size=VOCABULARY,
        is_tied=decoder.is_tied,
        is_gated=decoder.is_gated,
        batch_size=4,
        sequence_length=48,
        is_bf16=point.dtype == "bf16",
        ac=point.ac,
    )


def _worst_of_peers(found: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """Return of each other estimator its worst and its mean error, signed at the worst, and its failures."""
    worst: dict[str, dict[str, Any]] = {}
    for name in (*memory_peers.FORMULAS, "MemTracker"):
        said = [
            (each.peers[name], each.measured["peak_bytes"])
            for each in found
            if each.measured and name in each.peers
        ]
        errors = [one / real - 1 for one, real in said if isinstance(one, int)]
        worst[name] = {
            "points": len(errors),
            "failed": len(said) - len(errors),
            "worst_error": max(errors, key=abs, default=None),
            "mean_error": sum(map(abs, errors)) / len(errors) if errors else None,
        }
    return worst


def _table(findings: Sequence[Finding]) -> Table:
    def said(row: Finding, name: str) -> str:
        value = row.peers.get(name)
        if not isinstance(value, int) or row.measured is None:
            return "-" if value is None else "fails"
        return f"{value / row.measured['peak_bytes'] - 1:+.1%}"

    return table_of(
        findings,
        {
            "model": lambda row: row.point.model,
            "mesh": lambda row: row.point.mesh,
            "ac": lambda row: row.point.ac,
            "dtype": lambda row: row.point.dtype,
            "compile": lambda row: row.point.compile,
            "peak": "error:.3%",
            "largest error": "largest_error:.3%",
            "differs": lambda row: (
                row.problem or f"{', '.join(row.wrong) or 'nothing'}{' (estimate)' * bool(row.assumes)}"
            ),
            **{
                name: lambda row, name=name: said(row, name)  # type: ignore[misc]
                for name in (*memory_peers.FORMULAS, "MemTracker")
            },
        },
        title="Holdout: predicted against measured, worst first",
        caption="the last columns: error of other estimators of the peak",
    )


if __name__ == "__main__":
    sys.exit(main())

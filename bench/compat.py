"""What acbench does with the torch and the Python of this environment: facts, numbers of trials, tests.

`make compat TORCH=2.15.0 PYTHON=python3.12` makes an environment and runs this in it. A part alone keeps what
the file has of the others, if that is of the same torch and Python.

    python -m bench.compat --parts facts numbers chunks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from rich.table import Table

from bench.compat_facts import facts
from bench.output import keep, parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, UNBUDGETED, experiments, records
from harness.measure.environment import describe
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record

_ROOT = Path(__file__).parents[1]
_ALL = "not matrix and not slow"
_QUICK = f"{_ALL} and not expensive"
_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Tests that belong together.

    Fields:
        paths: of their files and folders below `tests`.
        marks: which of them run, as `pytest -m` takes it.
    """

    paths: tuple[str, ...]
    marks: str = _QUICK


AREAS: Mapping[str, Area] = {
    "variants": Area(paths=("strategies/ac", "strategies/regions")),
    "parity": Area(paths=("parity/test_matrix.py", "parity/test_detection.py"), marks=_ALL),
    "fsdp": Area(paths=("parity/test_fsdp.py", "strategies/ac/test_sharded.py"), marks=_ALL),
    "nested": Area(paths=("strategies/nested", "strategies/tracing")),
    "chunks": Area(paths=("strategies/chunk", "strategies/estimate")),
    "sharding": Area(paths=("strategies/shard",)),
    "meters": Area(paths=("harness/measure",)),
    "models": Area(paths=("harness/models",)),
    "trials": Area(paths=("harness/trial", "harness/ranks")),
    "plans": Area(paths=("strategies/budget",)),
    "predictions": Area(paths=("harness/predict", "harness/check", "harness/fit")),
    "records": Area(paths=("harness/records",)),
    "command": Area(
        paths=(
            "harness/command_line/test_cli.py",
            "harness/command_line/test_schema.py",
            "harness/test_deferred.py",
        )
    ),
}
"""The suite: tests that run code of torch, most of them as `make quick` chooses them."""

PARTS = ("facts", "numbers", *AREAS)
"""What a run consists of, in its order."""

_MESHES = ("single", "shard2", "tp2")
_SIZES = (
    "model=gpt_nano",
    "model.n_layers=2",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=32",
    "protocol=parity",
    "protocol.parity_steps=2",
)
_MORE = (
    ("ac=full", "mesh=shard2", "dtype=bf16_mixed"),
    ("ac=selective_op", "ac.matmul_recompute_every=2", "mesh=single"),
    ("ac=none", "chunk=budget", "chunk.fraction=0.6", "mesh=single"),
)
_PROTOCOL = {
    "overrides": _SIZES,
    "tests": {name: f"-m '{area.marks}' {' '.join(area.paths)}" for name, area in AREAS.items()},
}
_MEMORY = ("saved_bytes", "peak_bytes", "activation_peak_bytes", "host_peak_bytes")
_WORK = ("forward_flops", "backward_flops", "recomputed_flops", "collectives", "collective_bytes")


def main() -> int:
    """Run the parts and write the file after each; 1 if a test fails or a trial is not neutral."""
    arguments = _arguments()
    results = _kept(arguments.out)
    for name in arguments.parts:
        results = _run(name, results, arguments.workers)
        keep(arguments.out, protocol=_PROTOCOL, results=results)
    publish(_table(results), arguments.out, protocol=_PROTOCOL, results=results)
    for area, found in results.get("tests", {}).items():
        for test, problem in found["failures"].items():
            print(f"{area}: {test}: {problem}")
    if arguments.against is not None:
        before = json.loads(arguments.against.read_text("utf-8"))["results"]
        print("\n".join(differences(before, results)) or f"nothing differs from {arguments.against}")
    return int(is_bad(results))


def is_bad(results: Mapping[str, Any]) -> bool:
    """Whether a test has failed, or a trial is not neutral."""
    failed = any(found["failures"] for found in results.get("tests", {}).values())
    neutral = ("neutral", "neutral (tolerance)")
    return failed or any(trial["verdict"] not in neutral for trial in results.get("numbers", {}).values())


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what one result says otherwise than another, in lines: facts, numbers, tests that fail.

    Args:
        before, after: `results` of two files; parts that one of them lacks are left out.
    """
    pairs = {
        **_both(before, after, "facts"),
        **{
            f"{trial}: {name}": (old.get(name), new.get(name))
            for trial, (old, new) in _both(before, after, "numbers").items()
            for name in new
        },
        **{
            f"{area}: failed tests": tuple(sorted(found["failures"]) for found in both)
            for area, both in _both(before, after, "tests").items()
        },
    }
    return [f"{what}: {old} -> {new}" for what, (old, new) in pairs.items() if old != new]


def counted(report: str) -> dict[str, Any]:
    """Return what a JUnit report counts, and the first line of each failure."""
    cases = list(ET.fromstring(report).iter("testcase"))  # noqa: S314 (pytest wrote it, here and now)
    failures = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": _first_line(found)
        for case in cases
        for found in [*case.iter("failure"), *case.iter("error")][:1]
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def _first_line(found: ET.Element) -> str:
    return (found.get("message") or "").strip().partition("\n")[0][:200]


def _both(before: Mapping[str, Any], after: Mapping[str, Any], part: str) -> dict[str, tuple[Any, Any]]:
    old, new = before.get(part, {}), after.get(part, {})
    return {name: (old[name], new[name]) for name in new if name in old}


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "compat")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all by default")
    made.add_argument("--workers", type=int, default=2, help="processes that run tests")
    made.add_argument("--against", type=Path, help="a kept result; what differs is printed")
    return made.parse_args()


def _run(name: str, results: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return `results` with those of one part, run now."""
    if name == "facts":
        return {**results, "facts": facts()}
    if name == "numbers":
        return {**results, "numbers": _numbers()}
    return {**results, "tests": {**results.get("tests", {}), name: _tests(AREAS[name], workers)}}


def _tests(area: Area, workers: int) -> dict[str, Any]:
    """Run the tests of an area in a process of their own and return what they came to.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", area.marks]
        parallel = ["--workers", str(workers)] if workers > 1 else []
        paths = [f"tests/{path}" for path in area.paths]
        subprocess.run(
            [*command, *parallel, f"--junitxml={report}", "-o", "junit_family=xunit1", *paths],
            cwd=_ROOT,
            timeout=_LIMIT_S,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"bench.compat: pytest {' '.join(paths)} ended without a report")
        found = counted(report.read_text("utf-8"))
    return found | {"wall_s": round(time.monotonic() - started_s, 1)}


def _numbers() -> dict[str, Any]:
    """Return verdict, bytes, FLOPs and collectives of a small trial of every variant on three meshes."""
    points = [(f"ac={ac}", f"mesh={mesh}") for mesh, ac in product(_MESHES, UNBUDGETED)] + list(_MORE)
    chosen = experiments([*point, *_SIZES] for point in points)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        for mesh in dict.fromkeys(each.mesh for each in chosen):
            names = [" ".join(point) for point, each in zip(points, chosen, strict=True) if each.mesh == mesh]
            of_mesh = [each for each in chosen if each.mesh == mesh]
            ended = records(agent, of_mesh, Path(folder, mesh.label))
            found |= {name: _numbers_of(record) for name, record in zip(names, ended, strict=True)}
    return found


def _numbers_of(record: Record) -> dict[str, Any]:
    if record.memory is None or record.work is None:
        problem = None if record.error is None else record.error.message
        return {"verdict": record.verdict, "problem": problem}
    memory, work = asdict(record.memory), asdict(record.work)
    found = {name: memory[name] for name in _MEMORY} | {name: work[name] for name in _WORK}
    return {"verdict": record.verdict, **found}


def _kept(path: Path) -> dict[str, Any]:
    """Return the results of an earlier call in this environment, if the file has them."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text("utf-8"))
    here = describe("cpu")
    is_here = all(content["environment"][name] == here[name] for name in ("torch", "python"))
    return dict(content["results"]) if is_here else {}


def _table(results: Mapping[str, Any]) -> Table:
    environment = describe("cpu")
    columns: dict[str, Column] = {
        "area": lambda row: row[0],
        "passed": lambda row: str(row[1]["passed"]),
        "failed": lambda row: str(row[1]["failed"]),
        "skipped": lambda row: str(row[1]["skipped"]),
        "wall s": lambda row: f"{row[1]['wall_s']:.0f}",
    }
    title = f"Tests with torch {environment['torch']}, Python {environment['python']}"
    return table_of(results.get("tests", {}).items(), columns, title=title)


if __name__ == "__main__":
    sys.exit(main())

"""How long a trial takes next to the steps that it cannot do without: wall time / steps, of tiny models.

A sweep runs as `acbench -m` runs it. The steps of a trial are those before and at the instrumented one, and,
of variant and twin, those of parity, the warm-up and the timed pairs; where a plan is made, the plain model's
once more. Each counts the median of the timed ones. Wall time is that of the record, from the start of the
ranks to their results; the prediction before it, which searches for the plan, is no part of it. The first
trial of the sweep starts the fork server and takes the instrumented step of all twins: it is left out, as is
a budget that no plan keeps.

    python -m bench.overhead --part trials --models llama_nano mlp
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.records.record import Record
from harness.records.store import Store, trial_id
from harness.trial.steps import UNMEASURED_STEPS

TARGET = 1.5
"""Wall time / steps that a trial may take."""

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The time of one trial.

    Fields:
        wall_s: from the start of its ranks to their results.
        steps: training steps that it took, of variant and twin.
        pairs: timed pairs among them.
        steps_s: what these steps take without instruments.
    """

    model: str
    variant: str
    wall_s: float
    steps: int
    pairs: int
    steps_s: float

    @property
    def ratio(self) -> float:
        """Wall time / that of the steps."""
        return self.wall_s / self.steps_s


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    made = parser(__doc__, "trials", "overhead")
    made.add_argument("--models", nargs="+", default=["llama_nano"])
    made.add_argument("--variants", nargs="+", default=["none", "full", "selective_op", "budget"])
    made.add_argument("--fraction", default="0.9", help="ac.fraction of ac=budget")
    made.add_argument("--size", nargs="+", default=["batch_size=2", "sequence_length=64"], help="overrides")
    options = made.parse_args(words)
    common = [*options.size, "mesh=single", "data=synthetic", "tracker=none"]
    rows = [row for model in options.models for row in _rows(model, options, common)]
    columns: dict[str, Column] = {
        "model": "model",
        "ac": "variant",
        "wall, s": "wall_s:.2f",
        "steps": "steps",
        "timed pairs": "pairs",
        "a step, ms": lambda row: f"{row.steps_s / row.steps * 1e3:.1f}",
        "wall / steps": "ratio:.2f",
    }
    title = f"Wall time of trials / that of their steps; target {TARGET}"
    protocol = {name: value for name, value in vars(options).items() if name != "out"}
    results = [asdict(row) | {"ratio": row.ratio} for row in rows]
    publish(table_of(rows, columns, title=title), options.out, protocol=protocol, results=results)
    return 0


def _rows(model: str, options: Any, common: Sequence[str]) -> Iterator[Taken]:
    """Run the trials of one model and yield the time of each, without the first."""
    named = {each: [f"ac={each}"] for each in options.variants}
    if "budget" in named:
        named["budget"].append(f"ac.fraction={options.fraction}")
    chosen = experiments([[f"model={model}", *of_variant, *common] for of_variant in named.values()])
    sweep = [f"model={model}", f"ac={','.join(named)}", *named.get("budget", ())[1:], *common]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "-m", *sweep, "name=tiny", f"outputs_dir={folder}"]
        subprocess.run(command, cwd=_ROOT, stdout=subprocess.DEVNULL, check=True)
        store = Store(Path(folder, "tiny"))
        records = [store.read(trial_id(each.to_dict())) for each in chosen]
    found = zip(named, chosen, records, strict=True)
    later = sorted(found, key=lambda each: each[2].started_at)[1:]
    for variant, experiment, record in later:
        if record.status == "refused":
            sys.stderr.write(f"{model}, ac={variant}: {record.error}\n")
        else:
            yield _taken(model, variant, experiment, record)


def _taken(model: str, variant: str, experiment: Experiment, record: Record) -> Taken:
    """Return what one trial took."""
    time = record.time
    if time is None or time.ratio_to_baseline is None:
        raise RuntimeError(f"{model}, ac={variant}: nothing was timed: {record.status}, {record.error}")
    protocol, pairs = experiment.protocol, time.step_time_s.count
    instrumented, alike = UNMEASURED_STEPS + 1, protocol.parity_steps + protocol.warmup_steps + pairs
    planned = 0 if experiment.ac.step_planner is None else instrumented
    variant_s = time.step_time_s.median
    twin_s = variant_s / time.ratio_to_baseline.median
    started, finished = (datetime.fromisoformat(at) for at in (record.started_at, record.finished_at))
    return Taken(
        model=model,
        variant=variant,
        wall_s=(finished - started).total_seconds(),
        steps=instrumented + 2 * alike + planned,
        pairs=pairs,
        steps_s=(instrumented + alike) * variant_s + (alike + planned) * twin_s,
    )

"""What a report on a large sweep costs: the time of the command, the size of the page, the numbers in it.

The records are those of a kept sweep, under the address of each of as many seeds as are needed. They are made
as large as records get: each with the most moments that a step's timeline may have.

    python -m bench.overhead --part reports --records 5000
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path

from bench.output import parser, publish
from bench.table import table_of
from harness.measure.memory.storage_history import MOST_MOMENTS
from harness.records.measured import Moment
from harness.records.record import Record, validate
from harness.records.store import Store, trial_id

TARGET_S, TARGET_BYTES = 10.0, 10 * 1000 * 1000
"""Of the command from its start to its end, and of the page."""

_KEPT = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCost:
    """What one report took.

    Fields:
        records: in the sweep.
        command_s, command_cpu_s: wall-clock and CPU time of the command.
        page_bytes: size of the page.
        numbers: that the page shows with their exact value.
    """

    records: int
    command_s: float
    command_cpu_s: float
    page_bytes: int
    numbers: int


def main(words: Sequence[str]) -> int:
    """Write the records and the report; 1 when the page is too large. Times are reported."""
    made = parser(__doc__, "reports", "overhead")
    made.add_argument("--records", type=int, default=5000)
    arguments = made.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "large")
        for record in islice(records(), arguments.records):
            path = store.record_path(record.trial_id)
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(record.to_dict(), indent=1), encoding="utf-8")
        started, cpu_before_s = time.monotonic(), _children_cpu_s()
        subprocess.run(
            [sys.executable, "-m", "harness.report.main", str(store.root)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        took_s, cpu_s = time.monotonic() - started, _children_cpu_s() - cpu_before_s
        page = (store.root / "report.html").read_text(encoding="utf-8")
    row = ReportCost(
        records=arguments.records,
        command_s=took_s,
        command_cpu_s=cpu_s,
        page_bytes=len(page.encode()),
        numbers=page.count("<data "),
    )
    table = table_of(
        [row],
        {
            "records": "records:,",
            "command (target)": lambda row: f"{row.command_s:.1f} s ({TARGET_S:.0f})",
            "its CPU time": lambda row: f"{row.command_cpu_s:.1f} s",
            "page (target)": lambda row: f"{row.page_bytes / 1e6:.2f} MB ({TARGET_BYTES / 1e6:.0f})",
            "numbers with their exact value": "numbers:,",
        },
    )
    publish(table, arguments.out, protocol={"targets": [TARGET_S, TARGET_BYTES]}, results=[asdict(row)])
    return int(row.page_bytes > TARGET_BYTES)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def records() -> Iterator[Record]:
    """Yield the records of the kept sweep with seeds 0, 1, 2 and so on."""
    (path,) = _KEPT.glob("demo-cpu-*.json")
    kept = [validate(value) for value in json.loads(path.read_text(encoding="utf-8"))]
    for seed in count():
        for record in map(largest, kept):
            experiment = record.experiment | {"seed": seed}
            yield replace(record, experiment=experiment, trial_id=trial_id(experiment))


def largest(record: Record) -> Record:
    """Return `record` with a timeline of `MOST_MOMENTS`."""
    memory = record.memory
    if memory is None:
        return record
    peak = Moment(bytes=memory.peak_bytes, phase=memory.peak_phase, module=memory.peak_module)
    return replace(record, memory=replace(memory, timeline=(peak,) * MOST_MOMENTS))

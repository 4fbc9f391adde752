"""One instrumented step as it happened: each storage with its life, each operator with its place.

It stands next to the record, `step<rank>.json.gz`, and gives traces that other programs open. Numbers of a
report come from the record.
"""

from __future__ import annotations

import gzip
import json
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.records import files

_VERSION = 1
_NAME = re.compile(r"step(\d+)\.json\.gz")
_MOST_BYTES, _MOST_UNPACKED = 2**27, 2**30
_Row = TypeVar("_Row", bound=tuple[Any, ...])


class TracedStorage(NamedTuple):
    """A storage of a step.

    Fields:
        part: what it is, one of `PEAK_PARTS`.
        op, module, source: what made it; empty of what stood before the step.
        shape: that of the tensor that made it known, as `8x128`.
        on_host: whether it lies in host memory while the model computes elsewhere.
    """

    part: str
    op: str
    module: str
    source: str
    shape: str
    dtype: str
    on_host: bool


class TracedChange(NamedTuple):
    """A storage is made, gets another size, or dies; the first are those that stood before the step.

    Fields:
        delta: bytes by which it grows.
        operators: number of operators that had begun.
    """

    storage: int
    delta: int
    operators: int


class TracedOperator(NamedTuple):
    """An operator of a step.

    Fields:
        name: name and overload, `aten.mm.default`.
        node: name of the autograd node that ran it; empty outside of backward.
        is_recomputed: a forward operator of the backward pass.
    """

    name: str
    phase: str
    module: str
    source: str
    node: str
    is_recomputed: bool
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """A step on one rank.

    Fields:
        start: bytes of the storages that stood before the step, by number.
        storages, changes, operators: in order of time.
    """

    rank: int
    start: tuple[tuple[int, int], ...]
    storages: tuple[TracedStorage, ...]
    changes: tuple[TracedChange, ...]
    operators: tuple[TracedOperator, ...]

    def totals(self, *, on_host: bool = False) -> Iterator[int]:
        """Yield the bytes on the device, or off it, before the first change and after each."""
        running = sum(nbytes for number, nbytes in self.start if self.storages[number].on_host == on_host)
        yield running
        for change in self.changes:
            running += change.delta if self.storages[change.storage].on_host == on_host else 0
            yield running


def write_step(trace: StepTrace, folder: Path) -> None:
    """Write the trace of a rank into the folder of its trial. Raises OSError: it cannot be written."""
    value = {"version": _VERSION} | {each.name: getattr(trace, each.name) for each in fields(trace)}
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")
    packed = gzip.compress(text, compresslevel=3, mtime=0)
    # a trial that the machine loses loses it too, and runs again
    path = folder / f"step{trace.rank}.json.gz"
    files.write_atomically(path, packed, within=folder.parent, mode=files.SHARED, is_durable=False)


def read_steps(folder: Path) -> list[StepTrace]:
    """Return the traces of a trial by rank; none where it has kept none.

    Raises:
        OSError: one cannot be read.
        ValueError: one is torn or foreign; the message says how.
    """
    found = [path for path in folder.glob("step*.json.gz") if _NAME.fullmatch(path.name)]
    return sorted((_read(path) for path in found), key=lambda trace: trace.rank)


def _read(path: Path) -> StepTrace:
    try:
        with gzip.GzipFile(fileobj=BytesIO(files.read_bytes(path, _MOST_BYTES))) as unpacked:
            value = json.loads(unpacked.read(_MOST_UNPACKED))
        _require(value["version"] == _VERSION, f"this acbench reads version {_VERSION}")
        trace = StepTrace(
            rank=int(value["rank"]),
            start=tuple((int(number), int(nbytes)) for number, nbytes in value["start"]),
            storages=_rows(TracedStorage, value["storages"]),
            changes=_rows(TracedChange, value["changes"]),
            operators=_rows(TracedOperator, value["operators"]),
        )
        numbers = [number for number, *_ in (*trace.start, *trace.changes)]
        is_known = all(0 <= number < len(trace.storages) for number in numbers)
        _require(is_known, "it tells of a storage that it does not describe")
    except (EOFError, KeyError, RecursionError, TypeError, ValueError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: is no trace of a step: {error}") from error
    return trace


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


def _rows(cls: type[_Row], rows: Sequence[Sequence[Any]]) -> tuple[_Row, ...]:
    kinds = list(typing.get_type_hints(cls).values())
    for row in rows:
        if [type(item) for item in row] != kinds:
            raise ValueError(f"has {row!r} among its rows of {cls.__name__}")
    return tuple(cls(*row) for row in rows)

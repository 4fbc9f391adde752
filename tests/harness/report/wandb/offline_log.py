"""Reads W&B's offline log (`run-<id>.wandb`) without W&B's own reader.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of
seven bytes: blocks of 32 KiB, each chunk with a checksum, a length and its place in the record; the records
are protocol buffers. The checksum is plain CRC-32 over type and data, not LevelDB's masked CRC-32C.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _FILE_HEADER, _CHUNK_HEADER = 32_768, 7, 7
_FULL, _LAST = 1, 4


@dataclass(kw_only=True, slots=True)
class OfflineRun:
    """What a run has logged, in order."""

    run_id: str = ""
    project: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    exit_code: int | None = None


def read_run(path: Path) -> OfflineRun:
    run = OfflineRun()
    for record in _records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                run.run_id, run.project, run.group = (
                    record.run.run_id,
                    record.run.project,
                    record.run.run_group,
                )
                run.tags = tuple(record.run.tags)
                run.config |= _items(record.run.config.update)
            case "config":
                run.config |= _items(record.config.update)
            case "summary":
                run.summary |= _items(record.summary.update)
            case "history":
                run.history.append(_items(record.history.item))
            case "metric":
                run.step_metrics[record.metric.name] = record.metric.step_metric
            case "artifact" if not record.artifact.type.startswith("run_table"):
                run.artifacts[record.artifact.name] = [
                    entry.path for entry in record.artifact.manifest.contents
                ]
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _items(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[Any]:
    magic, number, version = struct.unpack_from("<4sHB", content)
    assert (magic, number, version) == (b":W&B", 0xBEE1, 0)
    position, parts = _FILE_HEADER, b""
    while position < len(content):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK_HEADER:
            position += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, position)
        start = position + _CHUNK_HEADER
        data = content[start : start + length]
        assert len(data) == length, f"torn at {position}"
        assert zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum, f"checksum at {position}"
        position, parts = start + length, parts + data
        if kind in {_FULL, _LAST}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record

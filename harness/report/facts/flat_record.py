"""A record as flat keys and rows, for trackers and CSV: panels of a tracker address no nested keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.records.record import Record
from harness.report.facts.quantities import Quantity

Scalar = int | float | str | bool | None

_SUMMARISED = ("status", "verdict", "error", "memory", "work", "time", "parity", "note")
_TABLES = ("saved_by_module", "calls")
"""Keys with a row for each block; they are shown as tables."""


def flat_config(record: Record) -> dict[str, Any]:
    """Return what was swept: `ac`, `mesh` and `model` are names, `ac_freq` and `mesh_dp_shard` options.

    An option whose name starts with its group's keeps its name (`ac.ac_freq` is `ac_freq`).
    """
    config: dict[str, Any] = {
        "trial_id": record.trial_id,
        "environment_id": record.environment_id,
        "sweep": record.name,
    }
    for key, value in record.experiment.items():
        if isinstance(value, Mapping):
            config |= dict(_flatten_group(key, value))
        else:
            config[key] = value
    return config | {
        f"environment_{key}": value
        for key, value in record.environment.items()
        if isinstance(value, int | float | str | bool)
    }


def flat_summary(record: Record) -> dict[str, Scalar]:
    """Return every scalar result by its path in the record, joined with underscores."""
    encoded = record.to_dict()
    return dict(_flatten_scalars({key: encoded[key] for key in _SUMMARISED}))


def summary_key(quantity: Quantity) -> str:
    """Return the key of a number in `flat_summary`."""
    return quantity.path.replace("/", "_")


def history(record: Record) -> list[dict[str, float]]:
    """Return one row a parity step (`loss`) and one a timed pair (step times of variant and twin)."""
    losses = () if record.parity is None else record.parity.losses
    rows: list[dict[str, float]] = [{"parity_step": step, "loss": loss} for step, loss in enumerate(losses)]
    if record.time is None:
        return rows
    samples = record.time.samples_s
    for pair, step_time_s in enumerate(samples.variant):
        row = {"timed_pair": pair, "variant_step_time_s": step_time_s}
        rows.append(row | ({"twin_step_time_s": samples.twin[pair]} if samples.twin else {}))
    return rows


def tables(record: Record) -> dict[str, tuple[Sequence[str], list[list[Any]]]]:
    """Return columns and rows of the largest saved storages and of saved bytes and forward calls by block."""
    if record.memory is None or record.work is None:
        return {}
    saved, calls = record.memory.saved_by_module, record.work.calls
    blocks = [[name, saved.get(name), calls.get(name)] for name in dict.fromkeys([*saved, *calls])]
    largest = [
        [each.bytes, each.op, each.module, str(list(each.shape)), each.dtype]
        for each in record.memory.largest_saved
    ]
    return {
        "blocks": (("module", "saved_bytes", "calls"), blocks),
        "largest_saved": (("bytes", "op", "module", "shape", "dtype"), largest),
    }


def _flatten_group(group: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for option, value in options.items():
        if option == "name":
            yield group, value
        elif isinstance(value, Mapping):
            yield from _flatten_group(f"{group}_{option}", value)
        else:
            yield option if option.startswith(f"{group}_") else f"{group}_{option}", value


def _flatten_scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in values.items():
        path = f"{prefix}{key}".replace(".", "_")
        if key in _TABLES or isinstance(value, list):
            continue
        if isinstance(value, Mapping):
            yield from _flatten_scalars(value, f"{path}_")
        elif value is not None:
            yield path, value

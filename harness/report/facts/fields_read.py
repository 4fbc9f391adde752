"""The fields of an experiment that a trial has read: a model with inputs of its own reads no sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.measured import TrainedModel
from harness.records.record import Record

_FACTORY = "factory"  # the option of a model that is made by the user
_UNREAD = {
    "tokens": set[str](),
    "samples": {"sequence_length"},
    "example": {"sequence_length", "batch_size"},
    "example rows": {"sequence_length", "batch_size"},
}
"""Fields without effect, by what a model reads."""


def as_read(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the experiment of each record, without batch and sequence length where the model reads none.

    What was refused keeps what it asked for. What ended badly reads what others of the same factory read.
    """
    known = {_model(record).get(_FACTORY): record.trained for record in records if record.trained is not None}
    return [_read(record, record.trained or known.get(_model(record).get(_FACTORY))) for record in records]


def _read(record: Record, trained: TrainedModel | None) -> dict[str, Any]:
    left_out = set() if record.status == "refused" else _unread(_model(record), trained)
    return {key: value for key, value in record.experiment.items() if key not in left_out}


def _unread(model: Mapping[str, Any], trained: TrainedModel | None) -> set[str]:
    """Return the fields without effect; of a record that does not say, what the model's options tell."""
    if trained is not None and _FACTORY in model:
        return _UNREAD[trained.inputs]
    return {"sequence_length"} if "family" in model and "vocab_size" not in model else set()


def _model(record: Record) -> Mapping[str, Any]:
    model = record.experiment.get("model")
    return model if isinstance(model, Mapping) else {}

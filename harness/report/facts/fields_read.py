"""The fields of an experiment that a trial has read: a model with inputs of its own reads no sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.records.record import Record
from harness.report.facts.commands import default

_FACTORY = "factory"  # the option of a model that is made by the user


def as_read(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the experiment of each record, without batch and sequence length where the model reads none.

    What was refused keeps what it asked for.
    """
    of_tokens = {_model(record).get(_FACTORY) for record in records if _reads_tokens(record)}
    return [_read(record, of_tokens) for record in records]


def _read(record: Record, of_tokens: Collection[Any]) -> dict[str, Any]:
    model = _model(record)
    left_out: set[str] = set()
    if record.status != "refused" and "family" in model:
        if "vocab_size" not in model:  # which every model of tokens has
            left_out = {"sequence_length"}
        elif _FACTORY in model and model[_FACTORY] not in of_tokens:
            left_out = {"sequence_length", "batch_size"}
    return {key: value for key, value in record.experiment.items() if key not in left_out}


def _reads_tokens(record: Record) -> bool:
    """Whether a trial counted tokens, or was given a length, which a factory with inputs refuses."""
    if record.time is not None:
        return record.time.tokens_per_s is not None
    is_asked = record.experiment.get("sequence_length") != default("sequence_length")
    return is_asked and record.status != "refused"


def _model(record: Record) -> Mapping[str, Any]:
    model = record.experiment.get("model")
    return model if isinstance(model, Mapping) else {}

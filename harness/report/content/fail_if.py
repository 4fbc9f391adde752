"""Conditions on what changed between two sweeps, for a continuous integration that must fail on them."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.records.record import STATUSES
from harness.records.verdict import VERDICTS
from harness.report.content.changes import matched
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING, plain
from harness.report.facts.number_words import NumberUnit, in_words
from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry, SweepRecords

QUANTITIES: Mapping[str, Quantity] = {
    "saved_bytes": quantities.SAVED,
    "peak_bytes": quantities.PEAK,
    "activation_peak_bytes": quantities.ACTIVATION_PEAK,
    "parameter_bytes": quantities.PARAMETERS,
    "gradient_bytes": quantities.GRADIENTS,
    "optimizer_bytes": quantities.OPTIMIZER,
    "host_peak_bytes": quantities.HOST_PEAK,
    "forward_flops": quantities.FORWARD_FLOPS,
    "backward_flops": quantities.BACKWARD_FLOPS,
    "recomputed_flops": quantities.RECOMPUTED_FLOPS,
    "offloaded_bytes": quantities.OFFLOADED,
    "chunks": quantities.CHUNKS,
    "step_time_s": quantities.STEP_TIME,
    "ratio_to_baseline": quantities.RATIO,
    "tokens_per_s": quantities.TOKENS_PER_S,
    "mfu": quantities.MFU,
    "hfu": quantities.HFU,
    "energy_j": quantities.ENERGY,
}
"""Numbers by their names in the record; a condition is about candidate / baseline."""

WORDS: Mapping[str, tuple[str, ...]] = {"status": STATUSES, "verdict": VERDICTS}
"""Words by their names in the record, with all that occur; a condition is about the candidate's."""

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
_OF_WORDS = ("==", "!=")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailIf:
    """A condition under which a candidate fails.

    Fields:
        name: one of `QUANTITIES` or `WORDS`.
        sign: comparison; of words `==` or `!=`.
        value: ratio candidate / baseline, or a word.
    """

    name: str
    sign: str
    value: float | str

    def __str__(self) -> str:
        """Return the condition as it is written."""
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.name}{self.sign}{value}"


def parse(text: str) -> FailIf:
    """Return the condition that `text` states, as in `peak_bytes>1.02` or `verdict!=neutral`.

    Raises:
        ValueError: it is none; the message says what would be.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        problem = f"must be a name, one of {' '.join(_OPERATORS)}, and a value"
        raise ValueError(f"{problem}, as in 'peak_bytes>1.02' or 'verdict!=neutral', got {text!r}")
    name, sign, value = found.groups()
    if name in WORDS:
        return FailIf(name=name, sign=sign, value=_word(name, sign, value))
    if name not in QUANTITIES:
        close = difflib.get_close_matches(name, [*QUANTITIES, *WORDS], n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        known = f"quantities: {', '.join(QUANTITIES)}; words: {', '.join(WORDS)}"
        raise ValueError(f"unknown quantity {name!r}; {meant}{known}")
    return FailIf(name=name, sign=sign, value=_ratio(name, value))


def failing(condition: FailIf, before: SweepRecords, after: SweepRecords) -> Iterator[str]:
    """Yield a line for every trial that meets a condition, or of which nobody can say that it does not.

    That is a trial of the baseline that the candidate lacks, and a number that only the baseline has.
    """
    pairs = list(matched(before, after))
    known = {entry.trial_id for entry, _ in pairs}
    for entry in before.entries:
        if entry.trial_id not in known:
            yield f"{entry.name}: no record in {after.name}"
    if condition.name in WORDS:
        yield from _failing_words(condition, pairs, after)
        return
    for one, other in pairs:
        line = _failing_number(condition, one, other)
        if line is not None:
            yield line


def _word(name: str, sign: str, value: str) -> str:
    if sign not in _OF_WORDS:
        raise ValueError(f"{name} is a word, which is compared with {' or '.join(_OF_WORDS)}, got {sign!r}")
    if value not in WORDS[name]:
        raise ValueError(f"unknown {name} {value!r}; one of {', '.join(WORDS[name])}")
    return value


def _ratio(name: str, value: str) -> float:
    try:
        ratio = float(value)
    except ValueError:
        ratio = math.nan
    if not math.isfinite(ratio):
        problem = f"{name} is a number, of which the ratio candidate / baseline is compared"
        raise ValueError(f"{problem}; must be a number, got {value!r}")
    return ratio


def _failing_words(
    condition: FailIf, pairs: Sequence[tuple[Entry, Entry]], after: SweepRecords
) -> Iterator[str]:
    """Yield the trials of the candidate with such a word, those that the baseline lacks too."""
    earlier = {other.trial_id: one for one, other in pairs}
    for entry in after.entries:
        word: str = getattr(entry.record, condition.name)
        if (word == condition.value) is (condition.sign == "=="):
            one = earlier.get(entry.trial_id)
            was = NOTHING if one is None else getattr(one.record, condition.name)
            yield f"{entry.name}: {was} → {word}"


def _failing_number(condition: FailIf, one: Entry, other: Entry) -> str | None:
    """Return a trial that a condition on a number fails, in words; `None` where it holds."""
    quantity = QUANTITIES[condition.name]
    before, after = quantity.of(one.record), quantity.of(other.record)
    if before is None:
        return None
    was = plain((one.number(quantity) or NOTHING,))
    if after is None:
        return f"{one.name}: {was} → no number: {other.record.status}, {other.record.verdict}"
    ratio = after / before if before else (1.0 if after == 0 else math.inf)
    assert isinstance(condition.value, float)
    if not _OPERATORS[condition.sign](ratio, condition.value):
        return None
    return f"{one.name}: {was} → {plain((other.number(quantity) or NOTHING,))} ({_written(ratio)})"


def _written(ratio: float) -> str:
    return in_words(ratio, NumberUnit.RATIO) if abs(ratio - 1) >= 0.01 or ratio == 1 else f"{ratio:.6g}×"  # noqa: RUF001, PLR2004 (times; else it would read as 1)

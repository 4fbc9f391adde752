"""Options that can be switched on, with what they need and take, and the rule that chooses one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from harness.experiment.experiment import Experiment

Writer: TypeAlias = "Callable[[Sequence[str]], str | None]"
"""Returns the text of a file for some of the blocks; `None` where it says nothing about them."""

TIE = 0.02
"""Share of seconds, and of bytes, up to which two steps are equal."""
_SIMPLICITY = ("none", "first", "selective_layer", "full", "selective_op", "rules", "offload", "full_offload")
"""Variants, the simplest first; what needs acbench while it trains comes after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The kind of proof that an option has.

    Fields:
        level: `bitwise`, or `tolerance` where the strategy declares one.
        words: what was trained, as a sentence says it.
    """

    batch_size: int
    steps: int
    level: str
    words: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as JSON values."""
        return {"batch_size": self.batch_size, "steps": self.steps, "level": self.level}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One thing that can be switched on.

    Fields:
        variant: short name, of which the file is `apply_<variant>.py`.
        title: what it does, for people.
        overrides: words of `acbench` that choose it.
        step_time_s: predicted seconds of a step.
        slowdown: step time divided by the plain step's, 1.0 for that.
        fits: whether the device has so many bytes, with the margin.
        largest_batch: the largest batch that fits; 0 where none does, `None` where that was not asked.
        bound_by: what the step waits for: `compute`, `memory`, `network` or `host`.
        write: gives the file; `None` where there is nothing to write.
        needs_acbench: whether its file imports acbench while it trains.
        plan: a plan next to its file, as text; `None` for none.
        verdict: `neutral`, `differs`, or `unverified` where nothing was proven.
        proof: how; `None` where nothing was.
        file: path of the file that was written.
    """

    variant: str
    title: str
    experiment: Experiment
    overrides: tuple[str, ...]
    peak_bytes: int
    saved_bytes: int
    extra_flops: int
    step_time_s: float
    slowdown: float
    fits: bool
    bound_by: str
    largest_batch: int | None = None
    write: Writer | None = field(default=None, repr=False)
    needs_acbench: bool = False
    plan: str | None = field(default=None, repr=False)
    verdict: str = "unverified"
    proof: Proof | None = None
    file: str | None = None

    @property
    def rank(self) -> int:
        """Place among all options by simplicity, the simplest first."""
        kind = "first" if self.variant.startswith("first_") else self.variant
        return _SIMPLICITY.index(kind) if kind in _SIMPLICITY else len(_SIMPLICITY)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {
            "variant": self.variant,
            "overrides": list(self.overrides),
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "extra_flops": self.extra_flops,
            "step_time_s": self.step_time_s,
            "slowdown": self.slowdown,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "bound_by": self.bound_by,
            "verdict": self.verdict,
            "proof": None if self.proof is None else self.proof.to_dict(),
            "file": self.file,
            "needs_acbench": self.needs_acbench,
        }


def words_of_classes(experiment: Experiment) -> tuple[str, ...]:
    """Return the words of `acbench` that name the blocks by class; none where their container names them."""
    classes = getattr(experiment.ac, "module_classes", ())
    return (f"ac.module_classes=[{','.join(classes)}]",) if classes else ()


def chosen(options: Sequence[Option]) -> Option | None:
    """Return the option to use; `None` where nothing fits.

    The fastest that fits; of those within 2 % of its time the one with the fewest bytes; of those within 2 %
    of both the simplest. What was seen to differ is no option.
    """
    fitting = [each for each in options if each.fits and each.verdict != "differs"]
    if not fitting:
        return None
    fastest_s = min(each.step_time_s for each in fitting)
    fast = [each for each in fitting if each.step_time_s <= fastest_s * (1 + TIE)]
    fewest = min(each.peak_bytes for each in fast)
    tied = [each for each in fast if each.peak_bytes <= fewest * (1 + TIE)]
    return min(tied, key=lambda each: (each.rank, each.step_time_s, each.peak_bytes))

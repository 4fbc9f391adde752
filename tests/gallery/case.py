"""What stands in the gallery: a model under checkpoints, and what is right to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from strategies import Strategy

Verdict: TypeAlias = Literal["neutral", "differs", "inert", "unverified", "refused"]
Variant: TypeAlias = Strategy | tuple[str, ...] | Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What training the plain model beside the checkpointed one shows, without any probe of the harness.

    Fields:
        parts: everything that differs; empty where nothing is wrong but the promise.
        gradients: relative error of the worst gradient, `inf` where one is missing, None where no run
            repeats it.
        saves: whether bytes fall although the promise is broken.
        torch_says: what torch warns of; empty where it says nothing.
    """

    parts: tuple[str, ...] = ("gradients",)
    gradients: float | None = 0.0
    saves: bool = False
    torch_says: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, a way to checkpoint it, and the verdict that it deserves.

    Fields:
        make: returns the plain model; or the model, its inputs and its loss, as `model=python` takes them.
        batch: inputs where `make` gives none: positional, by keyword, or a list of these, which are
            micro-batches: all forward, then all backward.
        variant: a strategy, options of the command, or a function that puts checkpoints into a model.
        verdict: the right one; `refused` where no trial ends well: by us, or by the module's own error.
        why: likely cause, or what makes it right, a sentence.
        fix: what mends a defect, a sentence.
        part: what differs first, a part of a training step; empty where any may.
        names: regular expressions of which the message must have one: module, parameter or value at fault.
        evidence: what differs, measured; None where it was not.
        like: number of the defect that a control looks like, 0 for none.
        reads: regular expressions, one for each name that the recomputation reads late; None where nobody
            has written them down.
        tolerated: one for each name that may be among the late reads and need not be.
        layers_fqn: container of the blocks, for options of the command.
        link: thread upstream that reports this or the like; empty where we know none.
        needs: what must be installed beyond torch: `compiler` or the name of a package.
    """

    make: Callable[[], Any]
    batch: Any = field(default=(), repr=False)
    variant: Variant
    verdict: Verdict = "neutral"
    why: str = ""
    fix: str = ""
    part: str = ""
    names: tuple[str, ...] = ()
    evidence: Evidence | None = None
    like: int = 0
    reads: tuple[str, ...] | None = None
    tolerated: tuple[str, ...] = ()
    layers_fqn: str = "blocks"
    link: str = ""
    needs: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The variant as options of the command; none where it is something else."""
        return self.variant if isinstance(self.variant, tuple) else ()

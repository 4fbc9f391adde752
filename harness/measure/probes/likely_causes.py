"""What a difference looks like: known defects of activation checkpointing, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.measure.probes.recomputed_values import Divergence, RecomputedValues
from harness.records.parity_result import PARTS, Parity
from harness.records.probed import Finding

_DRAWING = ("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "exponential")
_BETWEEN = "between"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of a difference.

    Fields:
        part, name, expected: those of the first difference.
        probe: the probe that saw it: `parity` or `between`.
        differing: for each part that differs anywhere, the name of its first difference.
        recomputed_ops: operators that ran again.
        divergence: the first recomputed value that forward did not make.
        lost, gained: parameters that get a gradient from one of the two models only.
        written: buffers that forward writes in place.
    """

    part: str
    name: str
    probe: str
    differing: dict[str, str]
    recomputed_ops: Collection[str]
    divergence: Divergence | None
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    expected: str = ""

    def has_run(self, *words: str) -> bool:
        """Say whether an operator with one of `words` in its name ran again."""
        return any(word in operator for operator in self.recomputed_ops for word in words)

    def draws(self) -> bool:
        """Say whether the first recomputed value that differs is a random one."""
        return self.divergence is not None and any(word in self.divergence.operator for word in _DRAWING)

    def changes(self, part: str, *words: str) -> bool:
        """Say whether a part differs, first in something with one of `words` in its name if any are given."""
        name = self.differing.get(part)
        return name is not None and (not words or any(word in name for word in words))


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelyCause:
    """A known defect.

    Fields:
        numbers: its entries in the gallery; several where they look alike, none where it has none.
        title: what happens.
        remedy: what to do.
        fits: says whether evidence looks like it.
    """

    numbers: tuple[int, ...]
    title: str
    remedy: str
    fits: Callable[[Evidence], bool]

    def __str__(self) -> str:
        where = f"gallery {' or '.join(map(str, self.numbers))}: " if self.numbers else ""
        return f"looks like {where}{self.title}; {self.remedy}"


_KEEP_RNG = "use preserve_rng_state=True"
_REWIND = "move the update out of the region, or use a variant with rewind=True"

CAUSES = (
    LikelyCause(
        numbers=(53, 54),
        title="something keeps what a region makes or is given after the step is done",
        remedy="let go of it after backward",
        fits=lambda seen: seen.part == "leak",
    ),
    LikelyCause(
        numbers=(),
        title="another set of outputs, such as no cache, which transformers turns off where it checkpoints",
        remedy="make the plain model return the same: config.use_cache = False",
        fits=lambda seen: seen.part == "outputs" and "Structure" in seen.expected,
    ),
    LikelyCause(
        numbers=(22,),
        title="a host copy that is no copy (save_on_cpu of tensors on the CPU) hides a change in place",
        remedy="change a copy, x.clone()",
        fits=lambda seen: seen.part == "hides_error" and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(8,),
        title="micro-batches in flight share state that hides an error of autograd",
        remedy="keep such state per call, or pass it as an argument",
        fits=lambda seen: seen.part == "hides_error" and seen.probe == _BETWEEN,
    ),
    LikelyCause(
        numbers=(23,),
        title="a buffer that backward needs is written before it, which checkpointing hides",
        remedy="write it after backward, or read a copy, buffer.clone()",
        fits=lambda seen: seen.part == "hides_error" and bool(seen.written),
    ),
    LikelyCause(
        numbers=(21,),
        title="a tensor that autograd keeps is changed in place, which checkpointing hides",
        remedy="change a copy, x.clone()",
        fits=lambda seen: seen.part == "hides_error",
    ),
    LikelyCause(
        numbers=(8,),
        title="micro-batches in flight share state: the recomputation of one reads what another has left",
        remedy="keep such state per call, or pass it as an argument",
        fits=lambda seen: seen.probe == _BETWEEN,
    ),
    LikelyCause(
        numbers=(18, 48),
        title="a reentrant region without an input that requires a gradient trains nothing",
        remedy="use use_reentrant=False, or enable_input_require_grads()",
        fits=lambda seen: bool(seen.lost) and not seen.recomputed_ops,
    ),
    LikelyCause(
        numbers=(19, 20, 51, 52),
        title="a region loses gradients of what it does not see: a dataclass, a keyword, a detached input",
        remedy="use use_reentrant=False, and pass tensors by position",
        fits=lambda seen: bool(seen.lost) and not seen.gained and seen.divergence is None,
    ),
    LikelyCause(
        numbers=(6,),
        title="the recomputation takes another branch, whose parameters get the gradient",
        remedy="choose the branch outside of the region, and pass the choice as an argument",
        fits=lambda seen: bool(seen.lost or seen.gained) and not seen.changes("rng_state"),
    ),
    LikelyCause(
        numbers=(3, 9),
        title="numbers of Python's or NumPy's generator are drawn anew in the recomputation",
        remedy="draw with torch's generator, or outside of the region",
        fits=lambda seen: seen.changes("rng_state", "python", "numpy"),
    ),
    LikelyCause(
        numbers=(1,),
        title="rrelu as the last operator of a region saves its noise before it is drawn",
        remedy="leave it out of the region",
        fits=lambda seen: seen.has_run("rrelu") and not seen.draws(),
    ),
    LikelyCause(
        numbers=(11, 27),
        title="random numbers such as dropout are drawn anew in the recomputation",
        remedy=_KEEP_RNG,
        fits=lambda seen: seen.changes("rng_state") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(28,),
        title="the recomputation draws random numbers, and the next step draws others",
        remedy=_KEEP_RNG,
        fits=lambda seen: seen.changes("rng_state"),
    ),
    LikelyCause(
        numbers=(4,),
        title="the region draws from a generator of its own, which is not put back",
        remedy="draw from the default generator, or use a variant with rewind=True",
        fits=lambda seen: seen.draws(),
    ),
    LikelyCause(
        numbers=(2,),
        title="spectral_norm iterates once more in the recomputation",
        remedy="leave it out of the region, or use a variant with rewind=True",
        fits=lambda seen: seen.changes("buffers", "parametrizations", "_u", "_v") and seen.has_run("mv"),
    ),
    LikelyCause(
        numbers=(12,),
        title="batch statistics are updated twice",
        remedy="freeze them, or use a variant with rewind=True",
        fits=lambda seen: seen.changes("buffers", "running_", "num_batches_tracked"),
    ),
    LikelyCause(
        numbers=(17,),
        title="a scale of delayed quantisation is updated in forward, so the recomputation has another",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("buffers", "amax", "scale") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(13,),
        title="a buffer that routes is updated in forward, so the recomputation routes otherwise",
        remedy=_REWIND,
        fits=lambda seen: (
            seen.has_run("topk")
            and (seen.changes("buffers") or seen.changes("state"))
            and seen.changes("gradients")
        ),
    ),
    LikelyCause(
        numbers=(37, 39, 64),
        title="a buffer that a region reads is updated in forward, so the recomputation reads another",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("buffers") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(14,),
        title="a buffer that counts is updated once more by the recomputation",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("buffers"),
    ),
    LikelyCause(
        numbers=(15,),
        title="a container grows once more in the recomputation",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("state", "length of "),
    ),
    LikelyCause(
        numbers=(16, 36, 38),
        title="an attribute that a region reads is changed in forward, so the recomputation reads another",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("state") and seen.changes("gradients"),
    ),
    LikelyCause(
        numbers=(32,),
        title="a counter or another attribute is changed once more by the recomputation",
        remedy=_REWIND,
        fits=lambda seen: seen.changes("state"),
    ),
    LikelyCause(
        numbers=(5, 6, 7),
        title="the recomputation reads what has changed since: a context variable, a flag, swapped weights",
        remedy="pass it, or a copy of it, as an argument of the region",
        fits=lambda seen: seen.divergence is not None,
    ),
)
"""The first that fits counts."""


def evidence_of(
    finding: Finding | Mapping[str, Any] | None,
    parity: Parity | None,
    values: RecomputedValues | None,
    **known: tuple[str, ...],
) -> Evidence | None:
    """Return what is known of the first difference; `None` where nothing differs.

    Args:
        finding: what a probe found, or the first difference; `None` for that of `parity`.
        parity: the two models side by side.
        values: how recomputed values compare.
        known: other fields of the evidence.
    """
    first = _first(finding, parity)
    if first is None:
        return None
    parts = {} if parity is None else {part: getattr(parity, part) for part in PARTS}
    return Evidence(
        part=first["part"],
        name=first["name"],
        expected=str(first["expected"]),
        probe=first["probe"],
        differing={
            part: each.first_difference.name
            for part, each in parts.items()
            if each.first_difference is not None
        },
        recomputed_ops=() if values is None else values.operators,
        divergence=None if values is None else values.first,
        **known,
    )


def _first(finding: Finding | Mapping[str, Any] | None, parity: Parity | None) -> Mapping[str, Any] | None:
    if isinstance(finding, Finding):
        return finding.first
    if finding is None and parity is not None and parity.first is not None:
        return {"probe": "parity", **asdict(parity.first)}
    return finding


def likely_cause(seen: Evidence) -> str:
    """Return what a difference looks like and what to do; empty where nothing known does."""
    return next((str(cause) for cause in CAUSES if cause.fits(seen)), "")

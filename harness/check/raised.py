"""What it means that one of the two models raises."""

from __future__ import annotations

from harness.check.not_neutral import Neutrality
from harness.check.subject import PassError

_PARTS = {"forward": "outputs", "backward": "gradients", "update": "parameters"}
_WHERE = {"parity": "", "between": "with micro-batches in flight, "}


def raised_by_variant(failure: PassError, *, probe: str) -> Neutrality:
    """Return that the variant raises where the plain model does not.

    Args:
        failure: the pass that raised.
        probe: the probe that saw it: `parity` or `between`.
    """
    part = "recomputation" if "recompu" in str(failure.error) else _PARTS[failure.phase]
    reason = f"{_WHERE[probe]}the variant's {failure.phase} raises {_said(failure)}"
    return _differs(failure, part, reason, probe=probe, expected="no error", actual=_said(failure))


def hidden_error(failure: PassError, *, probe: str) -> Neutrality:
    """Return that the variant trains where the plain model raises.

    Args:
        failure: the plain model's pass that raised.
        probe: as of `raised_by_variant`.
    """
    reason = (
        f"{_WHERE[probe]}the plain model's {failure.phase} raises and the variant's does not, which hides an "
        f"error: {_said(failure)}"
    )
    return _differs(failure, "hides_error", reason, probe=probe, expected=_said(failure), actual="no error")


def _differs(
    failure: PassError, part: str, reason: str, *, probe: str, expected: str, actual: str
) -> Neutrality:
    first = {
        "probe": probe, "step": 0, "part": part, "name": f"({failure.phase})", "rank": 0, "index": None,
        "expected": expected, "actual": actual,
    }  # fmt: skip
    return Neutrality(verdict="differs", reason=reason, first=first)


def _said(failure: PassError) -> str:
    return f"{type(failure.error).__name__}: {failure.error}"

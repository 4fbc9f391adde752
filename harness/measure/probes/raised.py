"""The meaning of an error that one of the two models raises."""

from __future__ import annotations

from harness.measure.probes.pass_error import Raised
from harness.records.probed import Finding

_PARTS = {"forward": "outputs", "backward": "gradients", "update": "parameters"}
_WHERE = {"between": "with micro-batches in flight, "}


def raised_by_variant(failure: Raised, *, probe: str) -> Finding:
    """Return that the variant raises where the plain model does not.

    Args:
        failure: what the variant's pass raised.
        probe: the probe that saw it: `parity` or `between`.
    """
    phase = failure.phase or "backward"
    return Finding(
        probe=probe,
        verdict="differs",
        reason=f"{_WHERE.get(probe, '')}the variant's {phase} raises {failure.said}",
        part="recomputation" if "recompu" in failure.said else _PARTS[phase],
        name=f"({phase})",
        rank=failure.rank,
        expected="no error",
        actual=failure.said,
    )


def hidden_error(failure: Raised, *, probe: str) -> Finding:
    """Return that the variant trains where the plain model raises.

    Args:
        failure: what the plain model's pass raised.
        probe: as of `raised_by_variant`.
    """
    return Finding(
        probe=probe,
        verdict="differs",
        reason=f"{_WHERE.get(probe, '')}the plain model's {failure.phase} raises and the variant's does not, "
        f"which hides an error: {failure.said}",
        part="hides_error",
        name=f"({failure.phase})",
        rank=failure.rank,
        expected=failure.said,
        actual="no error",
    )

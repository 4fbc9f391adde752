"""What it means that one of the two models raises."""

from __future__ import annotations

from harness.measure.probes.pass_error import PassError
from harness.records.probed import Finding

_PARTS = {"forward": "outputs", "backward": "gradients", "update": "parameters"}
_WHERE = {"between": "with micro-batches in flight, "}


def raised_by_variant(failure: PassError, *, probe: str, rank: int = 0) -> Finding:
    """Return that the variant raises where the plain model does not.

    Args:
        failure: the pass that raised.
        probe: the probe that saw it: `parity` or `between`.
        rank: this one.
    """
    said = _said(failure)
    return Finding(
        probe=probe,
        verdict="differs",
        reason=f"{_WHERE.get(probe, '')}the variant's {failure.phase} raises {said}",
        part="recomputation" if "recompu" in str(failure.error) else _PARTS[failure.phase],
        name=f"({failure.phase})",
        rank=rank,
        expected="no error",
        actual=said,
    )


def hidden_error(failure: PassError, *, probe: str, rank: int = 0) -> Finding:
    """Return that the variant trains where the plain model raises.

    Args:
        failure: the plain model's pass that raised.
        probe, rank: as of `raised_by_variant`.
    """
    said = _said(failure)
    return Finding(
        probe=probe,
        verdict="differs",
        reason=f"{_WHERE.get(probe, '')}the plain model's {failure.phase} raises and the variant's does not, "
        f"which hides an error: {said}",
        part="hides_error",
        name=f"({failure.phase})",
        rank=rank,
        expected=said,
        actual="no error",
    )


def _said(failure: PassError) -> str:
    return f"{type(failure.error).__name__}: {failure.error}"

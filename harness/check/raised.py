"""What it means that one of the two models raises."""

from __future__ import annotations

from harness.check.micro_batches import step_of
from harness.check.not_neutral import Neutrality
from harness.check.subject import PassError
from harness.check.workshop import Workshop
from harness.errors import ConfigError
from harness.measure.rng import seeded

_PARTS = {"forward": "outputs", "backward": "gradients", "update": "parameters"}


def what_raised(failure: PassError, workshop: Workshop) -> Neutrality:
    """Return the finding that a pass raised.

    Args:
        failure: the pass.
        workshop: makes another variant, to see whether it raises where the plain model does.

    Raises:
        ConfigError: the plain model does not train, with or without the variant.
    """
    said = f"{type(failure.error).__name__}: {failure.error}"
    if failure.is_variant:
        is_recomputation = "recompu" in str(failure.error)
        part = "recomputation" if is_recomputation else _PARTS[failure.phase]
        return _differs(part, f"({failure.phase})", f"the variant's {failure.phase} raises {said}", said)
    if failure.phase == "forward":
        problem = f"the plain model's forward raises {said}"
        raise ConfigError("batch", problem) from failure.error
    if _is_silent(workshop):
        reason = f"the plain model's backward raises and the variant's does not, which hides an error: {said}"
        return _differs("hides_error", f"({failure.phase})", reason, said)
    raise ConfigError("make", f"the plain model's backward raises {said}") from failure.error


def _is_silent(workshop: Workshop) -> bool:
    """Say whether the variant takes the step that the plain model does not."""
    subject = workshop.subject(is_variant=True)
    device = next(subject.model.parameters()).device
    try:
        with seeded(workshop.seed, step=0, dp_rank=0, device=device):
            subject.backward(subject.forward(step_of(workshop.passes).to(device))[1])
    except PassError:
        return False
    return True


def _differs(part: str, name: str, reason: str, said: str) -> Neutrality:
    expected, actual = (said, "no error") if part == "hides_error" else ("no error", said)
    first = {
        "step": 0,
        "part": part,
        "name": name,
        "rank": 0,
        "index": None,
        "expected": expected,
        "actual": actual,
        "probe": "parity",
    }
    return Neutrality(verdict="differs", reason=reason, first=first)

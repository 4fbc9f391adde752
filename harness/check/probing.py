"""The probes of a check: what is asked of a variant beyond steps that go one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass

import torch

from harness.check.micro_batches import step_of
from harness.check.not_neutral import Neutrality
from harness.check.raised import hidden_error, raised_by_variant
from harness.check.subject import PassError, Subject
from harness.check.workshop import Workshop, begin_anew
from harness.measure.parity.compare import Accepted, compare_steps
from harness.measure.probes.input_dependence import ignores_input
from harness.measure.probes.interlude import Pass, interlude, smaller
from harness.measure.probes.leak import Growth, growth
from harness.measure.probes.recomputed_values import RecomputedValues, recomputed_values
from harness.measure.rng import seeded
from harness.models.base import Batch
from harness.records.parity_result import Parity
from harness.trial.proof import CONTROLS


@dataclass(frozen=True, kw_only=True, slots=True)
class Probing:
    """Probes of one check.

    Fields:
        workshop: makes the models.
        device: device that computes.
        accepted: how far numbers may be apart; `None` asks for equal bits.
        recomputed: FQNs of what the variant recomputes.
    """

    workshop: Workshop
    device: torch.device
    accepted: Accepted | None
    recomputed: tuple[str, ...]

    def values(self) -> RecomputedValues | None:
        """Return how recomputed values compare with those of forward; `None` where the step raises."""
        subject = dataclasses.replace(self.workshop.subject(is_variant=True), between=_nothing)
        batch = step_of(self.workshop.passes).to(self.device)
        try:
            return recomputed_values(subject, batch, seed=self.workshop.seed, device=self.device)
        except PassError:
            return None

    def written(self) -> tuple[str, ...]:
        """Return the names of the buffers that the plain model's forward writes in place."""
        subject = self.workshop.subject(is_variant=False)
        buffers = dict(subject.model.named_buffers())
        before = {name: buffer._version for name, buffer in buffers.items()}  # noqa: SLF001 (autograd's own count)
        try:
            with seeded(self.workshop.seed, step=0, dp_rank=0, device=self.device):
                subject.forward(step_of(self.workshop.passes).to(self.device))
        except PassError:
            return ()
        return tuple(name for name, buffer in buffers.items() if buffer._version != before[name])  # noqa: SLF001

    def vacuous(self, found: Neutrality) -> Neutrality:
        """Return that nothing is proven where the plain model computes the same whatever it reads."""
        subject = self.workshop.subject(is_variant=False)

        def forward(batch: Batch) -> tuple[object, torch.Tensor]:
            with seeded(self.workshop.seed, step=0, dp_rank=0, device=self.device):
                return subject.forward(batch)

        try:
            is_dead = ignores_input(forward, lambda: step_of(self.workshop.passes).to(self.device))
        except PassError:  # other numbers of the same kind are no input of this model
            return found
        if not is_dead:
            return found
        reason = "neither outputs nor loss depend on the inputs, so equality proves nothing"
        return dataclasses.replace(found, verdict="unverified", reason=reason)

    def between(self, found: Neutrality) -> Neutrality:
        """Return what differs where micro-batches are in flight, and an evaluation comes between."""
        passes = self._in_flight()
        try:
            parity = self._compared(passes, is_variant=True)
        except PassError as failure:
            return self._raised(found, failure, passes)
        if parity.first is None or self._repeats_itself_not(passes):
            return found
        return dataclasses.replace(
            found,
            verdict="differs",
            reason=f"with micro-batches in flight, {str(parity.first).removeprefix('parity: ')}",
            first={"probe": "between", **asdict(parity.first)},
            parity=parity,
        )

    def leaking(self, found: Neutrality) -> Neutrality:
        """Return that the variant holds more after each step, where the plain model does not."""
        grown = self._growth(is_variant=True)
        if not grown.bytes_per_step:
            return found
        usual = self._growth(is_variant=False).bytes_per_step
        if grown.bytes_per_step <= usual:
            return found
        until = ", until garbage is collected" if grown.is_garbage else ""
        reason = f"each step leaves {grown.bytes_per_step} bytes more than the one before, {usual} without"
        first = {
            "probe": "leak", "step": 1, "part": "leak", "name": "(live storages)", "rank": 0, "index": None,
            "expected": usual, "actual": grown.bytes_per_step,
        }  # fmt: skip
        return dataclasses.replace(
            found, verdict="differs", reason=f"{reason} the variant{until}", first=first
        )

    def _growth(self, *, is_variant: bool) -> Growth:
        return growth(
            self.workshop.subject(is_variant=is_variant),
            lambda: step_of(self.workshop.passes).to(self.device),
            seed=self.workshop.seed,
            device=self.device,
        )

    def _in_flight(self) -> tuple[Pass, ...]:
        """Return the micro-batches that are in flight: the caller's, or the batch after a smaller one."""
        given = self.workshop.passes
        if len(given) > 1:
            return given
        return next(each for each in smaller(given[0]) if each is given[0] or self._takes(each)), given[0]

    def _takes(self, inputs: Pass) -> bool:
        """Say whether the plain model and its loss take `inputs`."""
        subject = self.workshop.subject(is_variant=False)
        try:
            with seeded(self.workshop.seed, step=0, dp_rank=0, device=self.device):
                subject.forward(step_of([inputs]).to(self.device))
        except PassError:
            return False
        return True

    def _interrupted(self, *, is_variant: bool) -> Subject:
        subject = self.workshop.subject(is_variant=is_variant)
        return dataclasses.replace(
            subject.with_parts(checkpointed=self.recomputed),
            between=self._evaluating if self._evaluates() else self._drawing,
        )

    def _evaluating(self, subject: Subject) -> None:
        inputs, keywords = next(iter(step_of(self.workshop.passes[:1]).to(self.device).inputs))
        interlude(subject.model, lambda: subject.call(*inputs, **keywords), self.device)

    def _drawing(self, subject: Subject) -> None:
        interlude(subject.model, lambda: None, self.device)

    def _evaluates(self) -> bool:
        """Say whether the plain model can be evaluated on what it is trained on."""
        subject = self.workshop.subject(is_variant=False)
        try:
            with seeded(self.workshop.seed, step=0, dp_rank=0, device=self.device):
                self._evaluating(subject)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001 (a model that is not made for evaluation may say so in any way)
            return False
        return True

    def _compared(self, passes: tuple[Pass, ...], *, is_variant: bool) -> Parity:
        begin_anew()
        plain, other = (self._interrupted(is_variant=each) for each in (False, is_variant))
        return compare_steps(
            self.workshop.trained(plain, passes, 1),
            self.workshop.trained(other, passes, 1),
            count=1,
            tolerance=self.accepted,
        )

    def _repeats_itself_not(self, passes: tuple[Pass, ...]) -> bool:
        return any(self._compared(passes, is_variant=False).first is not None for _ in range(CONTROLS))

    def _raised(self, found: Neutrality, failure: PassError, passes: tuple[Pass, ...]) -> Neutrality:
        """Return what it means that one of the two raises with micro-batches in flight."""
        said = f"with micro-batches in flight the plain model raises {failure.error}"
        if failure.is_variant:
            seen = raised_by_variant(failure, probe="between")
        elif failure.phase == "backward" and self._is_silent(passes):
            seen = hidden_error(failure, probe="between")
        else:
            return _noted(found, said)
        return dataclasses.replace(found, verdict=seen.verdict, reason=seen.reason, first=seen.first)

    def _is_silent(self, passes: tuple[Pass, ...]) -> bool:
        return is_silent(self._interrupted(is_variant=True), passes, self.workshop.seed, self.device)


def is_silent(subject: Subject, passes: tuple[Pass, ...], seed: int, device: torch.device) -> bool:
    """Say whether `subject` takes a step that the plain model does not."""
    try:
        with seeded(seed, step=0, dp_rank=0, device=device):
            subject.backward(subject.forward(step_of(passes).to(device))[1])
    except PassError:
        return False
    return True


def _nothing(_subject: Subject) -> None:
    """Leave micro-batches in flight."""


def _noted(found: Neutrality, note: str) -> Neutrality:
    return dataclasses.replace(found, notes=(*found.notes, note))

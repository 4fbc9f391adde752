"""The probes of a trial or a check: what is asked of a variant beyond steps that go one after the other.

All ranks of a process group ask the same in the same order, and go on by what they have agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from harness.errors import ConfigError
from harness.measure.parity.checksum import checksum
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import Snapshot
from harness.measure.probes.changed_since import StateChange, changed_since
from harness.measure.probes.finite_differences import Slope, slope
from harness.measure.probes.input_dependence import ignores_input
from harness.measure.probes.interlude import interlude, smaller, turned
from harness.measure.probes.late_reads import (
    Bisection,
    Effect,
    Group,
    LateReads,
    groups_of,
    singles_of,
)
from harness.measure.probes.leak import Growth, growth
from harness.measure.probes.micro_batches import MicroBatched
from harness.measure.probes.pass_error import PassError, Raised, told
from harness.measure.probes.raised import hidden_error, raised_by_variant
from harness.measure.probes.recomputed_values import RecomputedValues, recomputed_values
from harness.measure.probes.saved_values import SavedValues, saved_values
from harness.measure.probes.spots import KINDS, Spot, spots_of
from harness.measure.probes.tried import together, tried
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from harness.models.base import Batch, joined
from harness.records.parity_result import First, Parity
from harness.records.probed import Finding
from strategies.base import Tolerance

T = TypeVar("T")

CONTROLS = 3
"""Pairs of plain models that are compared before a variant is blamed."""

MOST_STEPS = 6
"""Steps of a search for what a recomputation reads, unless told otherwise; notes name what is left."""


class ModelSource(Protocol):
    """A source of the two models of a comparison."""

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The micro-batches of one step, of which each step takes a copy."""

    @property
    def whole_step(self) -> tuple[Batch, ...]:
        """All micro-batches of a step of the trial or check, of which `batches` may be a part."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    @property
    def seed(self) -> int:
        """The seed of each step."""

    @property
    def rank(self) -> int:
        """This rank, recorded with differences."""

    @property
    def dp_rank(self) -> int:
        """Index of the rank's batch among all data-parallel ones."""

    @property
    def accepted(self) -> Tolerance | None:
        """The difference that numbers may have; `None` asks for equal bits."""

    @property
    def is_alone(self) -> bool:
        """True if there is one rank, so that parameters are whole."""

    @property
    def takes_any_size(self) -> bool:
        """True if the models may be given smaller micro-batches, and be evaluated."""

    def trainee(self, *, is_variant: bool) -> MicroBatched:
        """Return a fresh model, whose weights are those of every other one."""

    def modules(self, trainee: MicroBatched) -> Mapping[str, nn.Module]:
        """Return the modules of a model by the plain model's names, without what a variant has put around."""

    def trained(self, trainee: MicroBatched, batches: Iterable[Batch]) -> Iterator[Snapshot]:
        """Train on `batches`, one a step, and yield what each computed, under the plain model's names."""

    def anywhere(self, seen: bool) -> bool:
        """Say whether something was seen on any rank; they all ask."""

    def begin_anew(self) -> None:
        """Forget what earlier models have left, before the next two are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The finding of one probe.

    Fields:
        finding: what is not as it should be; `None` for nothing.
        parity: the two models side by side, where the probe compared them.
        notes: sentences on what was not looked at, and why.
    """

    finding: Finding | None = None
    parity: Parity | None = None
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Probing:
    """Probes of one comparison."""

    source: ModelSource

    def probes(self, *, is_plain: bool = False, is_compiled: bool = False) -> tuple[str, ...]:
        """Return the names of the probes that suit, cheapest first.

        Args:
            is_plain: both models are the plain one, so that there is nothing to compare.
            is_compiled: no meter sees what runs.
        """
        if is_plain:
            return ("input_dependence",)
        seen = () if is_compiled else ("leak",)
        alone = ("finite_differences",) if self.source.is_alone and self.source.takes_any_size else ()
        return ("input_dependence", "between", *seen, *alone)

    def ask(self, probes: Sequence[str]) -> Asked:
        """Return what the first of `probes` that finds anything finds, with the notes of all so far."""
        questions = {
            "input_dependence": self.vacuous,
            "between": self.between,
            "leak": self.leaking,
            "finite_differences": self.sloping,
        }
        notes: tuple[str, ...] = ()
        for count, name in enumerate(probes, 1):
            asked = questions[name]()
            notes = (*notes, *asked.notes)
            if self.source.anywhere(asked.finding is not None):
                return replace(asked, notes=notes, names=tuple(probes[:count]))
        return Asked(notes=notes, names=tuple(probes))

    def values(self) -> RecomputedValues | None:
        """Return how recomputed values compare with those of forward; `None` where the step raises."""
        return tried(lambda: self._of_a_step(recomputed_values, is_variant=True)).value

    def saved(self) -> tuple[SavedValues, SavedValues] | None:
        """Return what one step of the plain model saves, and one of the variant; `None` where one raises."""
        plain, variant = (partial(self._of_a_step, saved_values, is_variant=each) for each in (False, True))
        return tried(lambda: (plain(), variant())).value

    def changed(self) -> tuple[StateChange, ...]:
        """Return the state that is another one when backward begins than when the plain model read it."""
        return tried(lambda: self._of_a_step(changed_since, is_variant=False)).value or ()

    def _of_a_step(self, question: Callable[..., T], *, is_variant: bool) -> T:
        return question(
            self.source.trainee(is_variant=is_variant).interrupted(_nothing),
            self._step(self.source.batches),
            seed=self.source.seed,
            dp_rank=self.source.dp_rank,
            device=self.source.device,
        )

    def late_reads(self, only: Collection[str] | None = None, *, most_steps: int = MOST_STEPS) -> LateReads:
        """Return what a recomputation reads besides its inputs, and would read otherwise had it changed.

        Everything reachable is changed between forward and backward. Where the variant's gradients become
        others and the plain model's do not, a bisection finds out which change it was.

        Args:
            only: names of the state that is changed; `None` for all.
            most_steps: steps of the search, besides up to four that tell whether there is anything to find.
        """
        if not self.source.is_alone or self.source.device.type == "cuda":
            return LateReads()  # an index out of range there ends the process
        search = partial(self._late_reads, only, most_steps)
        return tried(search, catching=(PassError, ConfigError)).value or LateReads()

    def vacuous(self) -> Asked:
        """Return that nothing is proven where the plain model computes the same whatever it reads."""
        # other numbers of the same kind may be no input of this model
        is_dead = tried(self._ignores_input, catching=(PassError, ConfigError)).value
        if self.source.anywhere(not is_dead):
            return Asked()
        reason = "neither outputs nor loss depend on the inputs, so equality proves nothing"
        return Asked(finding=Finding(probe="input_dependence", verdict="unverified", reason=reason))

    def between(self) -> Asked:
        """Return what differs where micro-batches are in flight, and an evaluation comes between."""
        batches = self._in_flight()
        between = self._evaluating if self._evaluates() else self._drawing
        asked = self._between(batches, between)
        if asked.notes and len(batches) > 1:  # one at a time, then
            alone = self._between(batches[-1:], between)
            return replace(alone, notes=(*asked.notes, *alone.notes))
        return asked

    def leaking(self) -> Asked:
        """Return that the variant holds more after each step, where the plain model does not."""
        grown = self._growth(is_variant=True)
        if not self.source.anywhere(bool(grown.bytes_per_step)):
            return Asked()
        usual = self._growth(is_variant=False).bytes_per_step
        if grown.bytes_per_step <= usual:
            return Asked()
        until = ", until garbage is collected" if grown.is_garbage else ""
        most = f"; most of it is of {grown.made_by}" if grown.made_by else ""
        reason = f"each step leaves {grown.bytes_per_step} bytes more than the one before, {usual} without"
        finding = Finding(
            probe="leak",
            verdict="differs",
            reason=f"{reason} the variant{until}{most}",
            part="leak",
            name="(live storages)",
            rank=self.source.rank,
            step=1,
            expected=usual,
            actual=grown.bytes_per_step,
        )
        return Asked(finding=finding)

    def sloping(self) -> Asked:
        """Return that the variant's gradients are not those of its loss, where the plain model's are."""
        small = self._smaller(self.source.batches[0])
        slopes = tried(lambda: self._slopes(small), catching=(PassError, ConfigError))
        if slopes.value is None:
            error = slopes.error.error if isinstance(slopes.error, PassError) else slopes.error
            return Asked(notes=(f"no finite differences: in float64 the model raises {error}",))
        variant, *plain = slopes.value
        if not plain:
            return Asked(notes=(f"no finite differences: {variant.unclear}",) if variant.unclear else ())
        if not plain[0].agrees or plain[0].unclear:
            own = f"{plain[0].by_gradients:.6g} by its gradients, {plain[0].by_loss:.6g} by its loss"
            said = "the plain model's gradients are not those of its loss, as of a straight-through estimator"
            return Asked(notes=(f"{said}: a slope of {own}",))
        finding = Finding(
            probe="finite_differences",
            verdict="differs",
            reason=f"the slope of the loss is {variant.by_gradients:.6g} by the variant's gradients and "
            f"{variant.by_loss:.6g} by differences of its loss",
            part="gradients",
            name="(slope of the loss)",
            expected=variant.by_loss,
            actual=variant.by_gradients,
        )
        return Asked(finding=finding)

    def _late_reads(self, only: Collection[str] | None, most_steps: int) -> LateReads:
        batches = self.source.batches if only is not None else (self._smaller(self.source.batches[0]),)
        spots: list[Spot] = []
        gradients = partial(self._gradients_after, batches)
        plain = gradients((), is_variant=False, seen=spots)
        recomputed = tuple(self.source.trainee(is_variant=True).checkpointed)
        groups = groups_of(spots, recomputed) if only is None else singles_of(spots, only)
        if not groups:
            return LateReads()
        variant = gradients((), is_variant=True)
        effect = partial(_effect, partial(gradients, is_variant=True), variant)
        if effect(groups) == "none" or gradients((), is_variant=True) != variant:
            return LateReads()
        effect_of_plain = partial(_effect, partial(gradients, is_variant=False), plain)
        own = Bisection(effect=effect_of_plain, steps_left=most_steps)  # backward itself may read state
        own.search(groups)
        left = [group for group in groups if group not in (*own.found, *own.loud, *own.open)]
        bisection = Bisection(effect=effect, steps_left=most_steps)
        for kind in KINDS:  # sizes change shapes, and an error of theirs says nothing of the others
            bisection.search([group for group in left if group.kind == kind])
        return LateReads(
            reads=tuple(group.late_read for group in bisection.found),
            open=tuple(group.late_read for group in (*own.open, *bisection.open)),
        )

    def _gradients_after(
        self,
        batches: tuple[Batch, ...],
        groups: Sequence[Group],
        *,
        is_variant: bool,
        seen: list[Spot] | None = None,
    ) -> tuple[int | None, ...]:
        """Return a digest of each gradient of a step with `groups` changed between forward and backward.

        Args:
            seen: takes all that could be changed.

        Raises:
            PassError: the step raises.
        """
        changed = {name for group in groups for name in group.spots}
        trainee = self.source.trainee(is_variant=is_variant)
        modules = self.source.modules(trainee)
        undoing = ExitStack()

        def change(_trainee: Trainee) -> None:
            spots = list(spots_of(trainee.model, modules))
            if seen is not None:
                seen.extend(spots)
            for spot in spots:
                if spot.name in changed:
                    undoing.callback(spot.change())

        with undoing:
            self._take(trainee.interrupted(change), batches)
        return tuple(
            None if parameter.grad is None else checksum(parameter.grad)
            for parameter in trainee.model.parameters()
        )

    def _ignores_input(self) -> bool:
        """Return whether outputs of the plain model do not depend on its input."""
        trainee = self.source.trainee(is_variant=False)

        def forward(batch: Batch) -> tuple[object, torch.Tensor]:
            with self._seeded():
                return trainee.forward(batch)

        return ignores_input(forward, lambda: self._step(self.source.batches))

    def _slopes(self, small: Batch) -> list[Slope]:
        """Return the variant's slope, and the plain model's where that is in doubt."""
        variant = self._slope(small, is_variant=True)
        return [variant] if variant.agrees else [variant, self._slope(small, is_variant=False)]

    def _slope(self, small: Batch, *, is_variant: bool) -> Slope:
        """Return how the loss moves along one direction, and what gradients say of it."""
        with told("forward", is_variant=is_variant):
            return slope(
                lambda: self.source.trainee(is_variant=is_variant).inner,
                lambda: small.to(self.source.device),
                seed=self.source.seed,
                device=self.source.device,
            )

    def is_silent(self, batches: tuple[Batch, ...], between: Callable[[Trainee], None] | None = None) -> bool:
        """Say whether the variant takes a step that the plain model does not, on every rank."""

        def step() -> None:
            trainee = self.source.trainee(is_variant=True)
            self._take(trainee if between is None else trainee.interrupted(between), batches)

        return not tried(step, catching=(PassError, ConfigError)).has_raised

    def _growth(self, *, is_variant: bool) -> Growth:
        return growth(
            together(lambda: self.source.trainee(is_variant=is_variant)),
            lambda: self._step(self.source.whole_step),
            seed=self.source.seed,
            dp_rank=self.source.dp_rank,
            device=self.source.device,
            anywhere=self.source.anywhere,
        )

    def _between(self, batches: tuple[Batch, ...], between: Callable[[Trainee], None]) -> Asked:
        """Compare variant and plain model with something done between forward and backward."""
        compared = tried(lambda: self._compared(batches, between, is_variant=True))
        if compared.has_raised:
            return self._raised(compared.raised, batches, between)
        parity = compared.value
        assert parity is not None, "it has not raised here either"
        if not self.source.anywhere(parity.first is not None) or self._is_fickle(batches, between):
            return Asked()
        return Asked(parity=parity, finding=None if parity.first is None else _differing(parity.first))

    def _in_flight(self) -> tuple[Batch, ...]:
        """Return the micro-batches that are in flight: the caller's, or the batch after another one."""
        given = self.source.batches
        if len(given) > 1:
            return given
        small = self._smaller(given[0])
        # the same batch twice would hide a recomputation from the later one's values
        return (next(self._taken((turned(small),)), small) if small is given[0] else small, given[0])

    def _smaller(self, given: Batch) -> Batch:
        """Return the smallest part of a batch that the plain model and its loss take."""
        cut = smaller(given)[:-1] if self.source.takes_any_size else []
        return next(self._taken(cut), given)

    def _taken(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for each in batches:
            if not tried(partial(self._forward, each), catching=(PassError, ConfigError)).has_raised:
                yield each

    def _forward(self, batch: Batch) -> None:
        trainee = self.source.trainee(is_variant=False)
        with self._seeded():
            trainee.forward(self._step((batch,)))

    def _take(self, trainee: MicroBatched, batches: tuple[Batch, ...]) -> None:
        with self._seeded():
            _, loss = trainee.forward(self._step(batches))
            trainee.backward(loss)

    def _evaluating(self, trainee: Trainee) -> None:
        (batch, *_) = self.source.batches
        interlude(trainee.model, lambda: trainee.forward(batch.to(self.source.device)), self.source.device)

    def _drawing(self, trainee: Trainee) -> None:
        interlude(trainee.model, lambda: None, self.source.device)

    def _evaluates(self) -> bool:
        """Say whether the plain model can be evaluated on what it is trained on."""
        if not self.source.takes_any_size:
            return False
        # a model that is not made for evaluation may say so in any way
        return not tried(self._evaluate, catching=(Exception,)).has_raised

    def _evaluate(self) -> None:
        trainee = self.source.trainee(is_variant=False)
        with self._seeded():
            self._evaluating(trainee.inner)

    def _compared(
        self, batches: tuple[Batch, ...], between: Callable[[Trainee], None], *, is_variant: bool
    ) -> Parity:
        """Return how one step compares between two models that something interrupts."""
        self.source.begin_anew()
        plain, other = (
            self.source.trained(
                self.source.trainee(is_variant=each).interrupted(between), [self._step(batches)]
            )
            for each in (False, is_variant)
        )
        return compare_steps(plain, other, count=1, rank=self.source.rank, tolerance=self.source.accepted)

    def _is_fickle(self, batches: tuple[Batch, ...], between: Callable[[Trainee], None]) -> bool:
        """Say whether the plain model does not repeat itself."""
        for _ in range(CONTROLS):
            control = tried(lambda: self._compared(batches, between, is_variant=False))
            is_equal = control.value is not None and control.value.first is None
            if self.source.anywhere(not is_equal):
                return True
        return False

    def _raised(
        self,
        ranks: tuple[Raised, ...],
        batches: tuple[Batch, ...],
        between: Callable[[Trainee], None],
    ) -> Asked:
        by_variant = [each for each in ranks if each.is_variant]
        if by_variant:
            return Asked(finding=raised_by_variant(by_variant[0], probe="between"))
        in_backward = [each for each in ranks if each.phase == "backward"]
        if in_backward and self.is_silent(batches, between):
            return Asked(finding=hidden_error(in_backward[0], probe="between"))
        said = ranks[0].said.partition(": ")[2] or ranks[0].said
        return Asked(notes=(f"with micro-batches in flight the plain model raises {said}",))

    def _step(self, batches: Iterable[Batch]) -> Batch:
        return joined(batches).to(self.source.device)

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(self.source.seed, step=0, dp_rank=self.source.dp_rank, device=self.source.device)


def _differing(first: First) -> Finding:
    return Finding(
        probe="between",
        verdict="differs",
        reason=f"with micro-batches in flight, {str(first).removeprefix('parity: ')}",
        part=first.part,
        name=first.name,
        rank=first.rank,
        step=first.step,
        index=first.index,
        expected=first.expected,
        actual=first.actual,
    )


def _effect(
    gradients: Callable[[Sequence[Group]], tuple[int | None, ...]],
    expected: tuple[int | None, ...],
    groups: Sequence[Group],
) -> Effect:
    """Return what a change of `groups` does to a step that leaves `expected` without it."""
    try:
        return "none" if gradients(groups) == expected else "gradients"
    except PassError:
        return "error"


def _nothing(_trainee: Trainee) -> None:
    """Leave micro-batches in flight."""

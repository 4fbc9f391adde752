"""`assert_neutral`: a model with a variant on it trains as the model without, or a test fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from harness.check.arguments import Precision, require_arguments
from harness.check.doubled_regions import DoubledRegions
from harness.check.explanation import OWN_CHECKPOINTING, Explanation
from harness.check.given_batches import given_batches
from harness.check.not_neutral import Neutrality, NotNeutral
from harness.check.workshop import Workshop
from harness.errors import ConfigError
from harness.measure.parity.compare import compare_steps
from harness.measure.probes.checkpoint_calls import Intervention, with_save_list
from harness.measure.probes.late_reads import LateReads
from harness.measure.probes.micro_batches import MicroBatched
from harness.measure.probes.pass_error import PassError
from harness.measure.probes.probing import CONTROLS, Asked, Probing
from harness.measure.probes.raised import hidden_error, raised_by_variant
from harness.measure.probes.recomputed_values import Divergence
from harness.measure.probes.trained_set import TrainedSet
from harness.measure.probes.tried import RanksRaised, agreed
from harness.measure.rng import seeded
from harness.measure.step import StepReport, instrument
from harness.models.base import joined
from harness.records.measured import MeasuredBaseline, Observed, RankResult
from harness.records.merge_ranks import merge_memory, merge_parities, merge_parity, merge_work
from harness.records.parity_result import Parity, Weightless
from harness.records.verdict import Verdict, verdict
from harness.trial.act import Act
from strategies import Strategy, Tolerance
from strategies.estimate.global_state import ledger

T = TypeVar("T")

_PROBED = ("neutral", "inert")
"""Verdicts after which the probes go on."""

_MOST_STEPS = 48
"""Of the search for what the recomputation of a neutral variant reads."""

_OTHER_SEEDS = range(1, 4)
"""Of steps that are looked at where the variant has done nothing in the measured one."""


def assert_neutral(
    make: Callable[[], nn.Module],
    batch: Any,
    variant: Strategy | Callable[[Any], Any],
    loss_fn: Callable[[Any], Any] | None = None,
    steps: int = 3,
    *,
    seed: int = 0,
    tolerance: Tolerance | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
) -> Neutrality:
    """Fail unless the model with `variant` trains bit for bit as the model without it.

    Both take `steps` optimizer steps from the same weights on the same batch, with the same random numbers.
    Outputs, loss, gradients, buffers, state of modules, RNG state and parameters are compared after each.

    Args:
        make: returns a fresh plain model, on the device to check on; called often, under one seed.
        batch: a tuple of positional inputs, a dict of keyword inputs, or a list of several of these, which
            are micro-batches of one step.
        variant: one of acbench's strategies, or any function that takes the model and returns the model to
            use, or changes it and returns nothing.
        loss_fn: function of what the model returns, gives a scalar; by default the `loss` of the output, or
            else the sum of the means of its floating-point tensors.
        steps: optimizer steps, at least 1.
        seed: seed of weights and of every step.
        tolerance: how far numbers may be apart; by default what the strategy declares, else not at all.
        autocast: dtype of `torch.autocast` around forward and loss, as training has it: backward and
            optimizer run outside.
        dtype: dtype of the models' floating-point parameters and buffers, and of floating-point inputs.
        quick: take one step, compare it, and ask nothing else: no probes, bytes, causes or late reads.

    Returns:
        What was found, `neutral`.

    Raises:
        NotNeutral: an `AssertionError`; the variant differs, does nothing, or nothing is proven.
        ConfigError: a `ValueError`; an argument is wrong, or the plain model does not train on `batch`.
        StrategyError: a `ValueError`; the strategy does not suit the model.
    """
    require_arguments(make, variant, loss_fn, steps, tolerance)
    precision = Precision(autocast=autocast, dtype=dtype)
    workshop = Workshop(
        make=make,
        variant=variant,
        loss_fn=loss_fn,
        batches=tuple(each.changed(precision.cast_inputs) for each in given_batches(batch)),
        seed=seed,
        accepted=tolerance or (variant.tolerance if isinstance(variant, Strategy) else None),
        precision=precision,
        is_quick=quick,
    )
    with ledger(), torch.enable_grad():
        agreed(workshop.check)
        try:
            with TemporaryDirectory() as folder:
                check = _Check(workshop=workshop, steps=1 if quick else steps).with_plan(Path(folder))
                found = check.quickly_found() if quick else check.found()
        finally:
            workshop.leave()
    found = replace(found, left_behind=workshop.left_behind)
    if found.verdict != "neutral":
        raise NotNeutral(found)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """One instrumented step.

    Fields:
        report: bytes and work.
        calls: forward calls by FQN.
        act: what it did of what strategies promise.
        notes: what it checkpoints twice.
    """

    report: StepReport
    calls: Mapping[str, int]
    act: Act
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """One call of `assert_neutral`."""

    workshop: Workshop
    steps: int

    def with_plan(self, folder: Path) -> _Check:
        """Return the check of a variant that has its plan, in `folder`, where it plans from a step."""
        variant = self.workshop.unplanned
        if variant is None:
            return self
        file = folder / "plan.json"
        try:
            agreed(partial(self.workshop.write_plan, variant, file))
        except RanksRaised:
            return self  # the plain model raises in the comparison too, which says what that means
        return replace(self, workshop=self.workshop.with_plan(variant, file))

    def found(self) -> Neutrality:
        """Return what the check finds, on all ranks alike.

        Raises:
            ConfigError: the plain model does not train, with or without the variant.
        """
        found = self.judged(self.workshop)
        source = replace(self.workshop, recomputed=found.recomputed_modules)
        probing = Probing(source=source)
        saving = Intervention(change=with_save_list)
        with nullcontext() if self.workshop.is_compiled else saving.active():
            values = probing.values()
        where, first = _first_of_ranks(None if values is None else values.first)
        changed = probing.changed() if found.first is not None else ()
        names = tuple(dict.fromkeys(change.name for change in changed if change.kind != "gradient hook"))
        read_late = probing.late_reads(names) if names and not self.workshop.is_compiled else LateReads()
        late = LateReads()
        if found.verdict == "neutral" and not self.workshop.is_compiled:
            late = probing.late_reads(most_steps=_MOST_STEPS)
        found = replace(
            found,
            recomputation=first,
            recomputation_rank=where,
            changed=names,
            read_late=read_late.names,
            late_reads=late.names,
            notes=(*found.notes, *late.notes),
            margins=() if values is None else values.margins,
        )
        explanation = Explanation(workshop=self.workshop, judge=self.judged, is_equal=self.is_equal)
        return explanation.of(
            found,
            probing,
            None if values is None else replace(values, first=first),
            changed,
            has_save_list=self.workshop.anywhere(saving.count > 0),
        )

    def judged(self, workshop: Workshop) -> Neutrality:
        """Return what steps and probes say, on all ranks alike.

        Raises:
            ConfigError: the plain model does not train, with or without the variant.
        """
        check = replace(self, workshop=workshop)
        try:
            found = check.judged_by_steps()
        except RanksRaised as failures:
            found = check.judged_by_error(failures)
        probing = Probing(source=replace(workshop, recomputed=found.recomputed_modules))
        if not workshop.anywhere(found.verdict not in _PROBED):
            found = _with(found, probing.ask(probing.probes()))
        return _agreed(found)

    def is_equal(self, workshop: Workshop, steps: int) -> bool:
        """Say whether the first steps of the variant are those of the plain model."""
        try:
            parity = replace(self, workshop=workshop).compared((), is_variant=True, count=steps)
        except PassError:
            return False
        return parity.first is None

    def quickly_found(self) -> Neutrality:
        """Return how the steps compare, on all ranks alike, and nothing else.

        Raises:
            ConfigError: the plain model does not train, with or without the variant.
        """
        trained = TrainedSet(), TrainedSet()
        try:
            parity = self._parity((), trained)
        except RanksRaised as failures:
            return self.judged_by_error(failures)
        parity = merge_parities(_everywhere(parity))
        found = _of_parity(parity, verdict(saves_nothing=True, memory=None, work=None, parity=parity))
        return replace(found, lost=trained[0].beyond(trained[1]), gained=trained[1].beyond(trained[0]))

    def judged_by_error(self, failures: RanksRaised) -> Neutrality:
        """Return what it means that one of the two raises, on some rank.

        Raises:
            ConfigError: the plain model does not train.
        """
        by_variant = [each for each in failures.raised if each.is_variant]
        if by_variant:
            return _with(
                Neutrality(verdict="neutral"), Asked(finding=raised_by_variant(by_variant[0], probe="parity"))
            )
        failure = failures.raised[0]
        where = "" if self.workshop.is_alone else f" on rank {failure.rank}"
        if failure.phase == "forward":
            raise ConfigError(
                "batch", f"the plain model's forward raises{where} {failure.said}"
            ) from failures
        if Probing(source=self.workshop).is_silent(self.workshop.batches):
            return _with(Neutrality(verdict="neutral"), Asked(finding=hidden_error(failure, probe="parity")))
        raise ConfigError("make", f"the plain model's backward raises{where} {failure.said}") from failures

    def judged_by_steps(self) -> Neutrality:
        """Return what steps that go one after the other show.

        Raises:
            RanksRaised: a pass of one of the models raised, on some rank.
        """
        plain, variant = agreed(lambda: [self._measured(is_variant=each) for each in (False, True)])
        recomputed = _called_again(plain.calls, variant.calls)
        work = variant.report.work.beyond(plain.report.work)
        idle = variant.act.is_idle(plain.act)
        acts_otherwise = self.workshop.anywhere(idle) and agreed(self._acts_otherwise)
        result = RankResult(
            rank=self.workshop.rank,
            local_rank=0,
            memory=variant.report.memory,
            work=replace(work, calls={}, acted_otherwise=idle and acts_otherwise),
            observation=variant.act.observation,
            baseline=MeasuredBaseline(memory=plain.report.memory, work=plain.report.work),
            parity=self._parity(recomputed, trained := (TrainedSet(), TrainedSet())),
        )
        saves_nothing = promises_nothing(self.workshop.variant)
        found = _judged_by(_everywhere(result), recomputed, saves_nothing=saves_nothing)
        return replace(
            found,
            lost=trained[0].beyond(trained[1]),
            gained=trained[1].beyond(trained[0]),
            notes=(*found.notes, *_own_recomputation(plain), *variant.notes, *work.policy_notes()),
        )

    def _measured(self, *, is_variant: bool, seed: int = 0) -> _Measured:
        """Return the measurements of one step, after a first one that makes optimizer state and the like."""
        device = self.workshop.device
        subject = self.workshop.subject(is_variant=is_variant)
        trainee = MicroBatched(
            inner=subject.with_parts(blocks=dict(subject.names.modules)), is_variant=is_variant
        )
        batch = joined(self.workshop.batches)
        with seeded(self.workshop.seed, step=0, dp_rank=0, device=device):
            trainee.zero_grad()
            trainee.backward(trainee.forward(batch.to(device))[1])
            trainee.update()
        doubled = DoubledRegions(modules=subject.names.modules)
        with doubled.watched():
            report = instrument(trainee, batch.to(device), seed=seed)
        observed = Observed(**asdict(subject.observe()))
        act = Act(memory=report.memory, work=report.work, observation=observed)
        return _Measured(report=report, calls=report.work.calls, act=act, notes=doubled.notes)

    def _acts_otherwise(self) -> bool:
        """Say whether the variant does something with other random numbers: a model may drop all blocks."""
        pairs = (
            [self._measured(is_variant=is_variant, seed=seed).act for is_variant in (True, False)]
            for seed in _OTHER_SEEDS
        )
        acting = [not variant.is_idle(plain) for variant, plain in pairs]  # on all ranks alike
        return any(acting)

    def _parity(self, recomputed: tuple[str, ...], trained: tuple[TrainedSet, TrainedSet]) -> Parity:
        """Return how the steps compare.

        Where they differ, the plain model is compared with itself as a control.
        """
        parity = agreed(lambda: self.compared(recomputed, is_variant=True, count=self.steps, trained=trained))
        if not self.workshop.anywhere(parity.first is not None):
            return parity
        step = self.steps if parity.first is None else parity.first.step + 1
        for _ in range(CONTROLS):
            control = agreed(lambda: self.compared(recomputed, is_variant=False, count=step))
            if self.workshop.anywhere(control.first is not None):
                break
        return replace(parity, control=control)

    def compared(
        self,
        recomputed: tuple[str, ...],
        *,
        is_variant: bool,
        count: int,
        trained: tuple[TrainedSet, TrainedSet] | None = None,
    ) -> Parity:
        """Return how a fresh model compares with a fresh plain one over `count` steps.

        Args:
            recomputed: FQNs of what the variant recomputes.
            is_variant: the fresh model has the variant on it.
            trained: note what the plain model and the other one train.
        """
        expected_set, actual_set = trained or (TrainedSet(), TrainedSet())
        source = replace(self.workshop, recomputed=recomputed)
        source.begin_anew()
        plain, other = (source.trainee(is_variant=each) for each in (False, is_variant))
        batch = joined(source.batches)
        batches, others = ((batch.to(source.device) for _ in range(count)) for _ in range(2))
        return compare_steps(
            expected_set.watching(source.trained(plain, batches)),
            actual_set.watching(source.trained(other, others)),
            count=count,
            rank=source.rank,
            tolerance=source.accepted,
        )


def _own_recomputation(plain: _Measured) -> tuple[str, ...]:
    if not plain.report.work.recomputed_ops:
        return ()
    count = sum(plain.report.work.recomputed_ops.values())
    return (
        f"{OWN_CHECKPOINTING}: it computes {count} operators of a step again, with the variant and without",
    )


def _with(found: Neutrality, asked: Asked) -> Neutrality:
    """Return `found` with what a probe found."""
    found = replace(found, notes=(*found.notes, *asked.notes))
    finding = asked.finding
    if finding is None:
        return found
    return replace(
        found,
        verdict=finding.verdict,
        reason=finding.reason,
        first=finding.first,
        parity=asked.parity or found.parity,
    )


def _judged_by(ranks: list[RankResult], recomputed: tuple[str, ...], *, saves_nothing: bool) -> Neutrality:
    """Return what all ranks say together, by the rules of a trial."""
    memory, work = merge_memory(ranks, is_plain=False), merge_work(ranks, is_plain=False)
    parity = merge_parity(ranks)
    assert parity is not None, "every rank has compared"
    notes: tuple[str, ...] = ()
    if _has_proof_before(parity.weightless):
        notes = (str(parity.weightless),)
        parity = replace(parity, weightless=Weightless())
    shown = verdict(saves_nothing=saves_nothing, memory=memory, work=work, parity=parity)
    return replace(
        _of_parity(parity, shown),
        saved_bytes=memory.saved_bytes,
        plain_saved_bytes=None if memory.baseline is None else memory.baseline.saved_bytes,
        recomputed_ops=work.recomputed_ops,
        recomputed_flops=work.recomputed_flops,
        recomputed_modules=recomputed,
        notes=notes,
    )


def _of_parity(parity: Parity, shown: Verdict) -> Neutrality:
    first = parity.first if shown.word == "differs" else None
    return Neutrality(
        verdict=shown.word,
        reason=shown.reason,
        first=None if first is None else {"probe": "parity", **asdict(first)},
        parity=parity,
    )


def _has_proof_before(weightless: Weightless) -> bool:
    """Say whether steps with gradients came before those without: layers may be dropped in some."""
    starts = (weightless.zero_from, weightless.zero_blocks_from)
    return (
        weightless.not_finite_from is None
        and all(start is None or start > 0 for start in starts)
        and any(starts)
    )


def _called_again(plain: Mapping[str, int], variant: Mapping[str, int]) -> tuple[str, ...]:
    """Return the outermost modules that the variant calls more often than the plain model does."""
    names = [fqn for fqn, count in variant.items() if fqn and count > plain.get(fqn, count)]
    return tuple(
        name for name in names if not any(name.startswith(f"{other}.") for other in names if other != name)
    )


def promises_nothing(variant: Any) -> bool:
    """Say whether the variant is one of ours that changes nothing: `ac=none`, `chunk=none`."""
    return isinstance(variant, Strategy) and type(variant).__module__.endswith(".none")


def _first_of_ranks(divergence: Divergence | None) -> tuple[int | None, Divergence | None]:
    if not dist.is_initialized():
        return None, divergence
    found = [(rank, each) for rank, each in enumerate(_everywhere(divergence)) if each is not None]
    return found[0] if found else (None, None)


def _agreed(found: Neutrality) -> Neutrality:
    """Return what this rank found; where it found nothing, the verdict of a rank that did."""
    for verdict_there, reason, first in _everywhere((found.verdict, found.reason, found.first)):
        if found.verdict in _PROBED and verdict_there not in _PROBED:
            return replace(found, verdict=verdict_there, reason=reason, first=first)
    return found


def _everywhere(value: T) -> list[T]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

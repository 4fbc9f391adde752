"""`assert_neutral`: a model with a variant on it trains as the model without, or a test fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.check.micro_batches import given_passes, step_of
from harness.check.not_neutral import Neutrality, NotNeutral
from harness.check.raised import what_raised
from harness.check.subject import PassError
from harness.check.workshop import Workshop
from harness.errors import require_at_least
from harness.measure.parity.compare import Accepted, compare_steps
from harness.measure.rng import seeded
from harness.measure.step import StepReport, instrument
from harness.records.measured import MeasuredBaseline, Observed, RankResult
from harness.records.merge_ranks import merge_memory, merge_parity, merge_work
from harness.records.parity_result import Parity
from harness.records.verdict import verdict
from harness.trial.act import Act
from strategies import Strategy, Tolerance

CONTROLS = 3
"""Pairs of plain models that are compared before a variant is blamed."""

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

    Returns:
        What was found, `neutral`.

    Raises:
        NotNeutral: an `AssertionError`; the variant differs, does nothing, or nothing is proven.
        ConfigError: a `ValueError`; an argument is wrong, or the plain model does not train on `batch`.
        StrategyError: a `ValueError`; the strategy does not suit the model.
    """
    require_at_least("steps", steps, 1)
    passes = given_passes(batch)
    workshop = Workshop(make=make, variant=variant, loss_fn=loss_fn, passes=passes, seed=seed)
    with torch.enable_grad():
        device = workshop.check()
        check = _Check(workshop=workshop, steps=steps, accepted=_accepted(variant, tolerance), device=device)
        try:
            found = check.found()
        except PassError as failure:
            raise NotNeutral(what_raised(failure, workshop)) from failure.error
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
    """

    report: StepReport
    calls: Mapping[str, int]
    act: Act


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """One call of `assert_neutral`."""

    workshop: Workshop
    steps: int
    accepted: Accepted | None
    device: torch.device

    def found(self) -> Neutrality:
        """Return what the check finds, on all ranks alike."""
        plain, variant = (self._measured(is_variant=is_variant) for is_variant in (False, True))
        recomputed = _called_again(plain.calls, variant.calls)
        work = variant.report.work.beyond(plain.report.work)
        idle = variant.act.is_idle(plain.act)
        result = RankResult(
            rank=_rank(),
            local_rank=0,
            memory=variant.report.memory,
            work=replace(work, calls={}, acted_otherwise=idle and self._acts_otherwise()),
            observation=variant.act.observation,
            baseline=MeasuredBaseline(memory=plain.report.memory, work=plain.report.work),
            parity=self._parity(recomputed),
        )
        return _judged(_gathered(result), recomputed, saves_nothing=_promises_nothing(self.workshop.variant))

    def _measured(self, *, is_variant: bool, seed: int = 0) -> _Measured:
        """Return what one step does, after one that fills what is made lazily."""
        subject = self.workshop.subject(is_variant=is_variant)
        batch = step_of(self.workshop.passes)
        with seeded(self.workshop.seed, step=0, dp_rank=0, device=self.device):
            subject.zero_grad()
            subject.backward(subject.forward(batch.to(self.device))[1])
            subject.update()
        watched = subject.with_parts(blocks=dict(subject.names.modules))
        report = instrument(watched, batch.to(self.device), seed=seed)
        observed = Observed(**asdict(subject.observe()))
        act = Act(saved_bytes=report.memory.saved_bytes, work=report.work, observation=observed)
        return _Measured(report=report, calls=report.work.calls, act=act)

    def _acts_otherwise(self) -> bool:
        """Say whether the variant does something with other random numbers: a model may drop all blocks."""
        pairs = (
            [self._measured(is_variant=is_variant, seed=seed).act for is_variant in (True, False)]
            for seed in _OTHER_SEEDS
        )
        return any(not variant.is_idle(plain) for variant, plain in pairs)

    def _parity(self, recomputed: tuple[str, ...]) -> Parity:
        parity = self._compared(recomputed, is_variant=True, count=self.steps)
        if not _anywhere(parity.first is not None):
            return parity
        step = self.steps if parity.first is None else parity.first.step + 1
        for _ in range(CONTROLS):
            control = self._compared(recomputed, is_variant=False, count=step)
            if _anywhere(control.first is not None):
                break
        return replace(parity, control=control)

    def _compared(self, recomputed: tuple[str, ...], *, is_variant: bool, count: int) -> Parity:
        """Return how a fresh model compares with a fresh plain one over `count` steps."""
        gc.collect()  # before the next two models are made
        plain, other = (
            self.workshop.subject(is_variant=each).with_parts(checkpointed=recomputed)
            for each in (False, is_variant)
        )
        passes = self.workshop.passes
        return compare_steps(
            self.workshop.trained(plain, passes, count),
            self.workshop.trained(other, passes, count),
            count=count,
            rank=_rank(),
            tolerance=self.accepted,
        )


def _judged(ranks: list[RankResult], recomputed: tuple[str, ...], *, saves_nothing: bool) -> Neutrality:
    """Return what all ranks say together, by the rules of a trial."""
    memory, work = merge_memory(ranks, is_plain=False), merge_work(ranks, is_plain=False)
    parity = merge_parity(ranks)
    shown = verdict(saves_nothing=saves_nothing, memory=memory, work=work, parity=parity)
    first = parity.first if parity is not None and shown.word == "differs" else None
    return Neutrality(
        verdict=shown.word,
        reason=shown.reason,
        first=None if first is None else {"probe": "parity", **asdict(first)},
        parity=parity,
        saved_bytes=memory.saved_bytes,
        plain_saved_bytes=None if memory.baseline is None else memory.baseline.saved_bytes,
        recomputed_ops=work.recomputed_ops,
        recomputed_flops=work.recomputed_flops,
        recomputed_modules=recomputed,
    )


def _called_again(plain: Mapping[str, int], variant: Mapping[str, int]) -> tuple[str, ...]:
    """Return the outermost modules that the variant calls more often than the plain model does."""
    names = [fqn for fqn, count in variant.items() if fqn and count > plain.get(fqn, count)]
    return tuple(
        name for name in names if not any(name.startswith(f"{other}.") for other in names if other != name)
    )


def _promises_nothing(variant: Any) -> bool:
    """Say whether the variant is one of ours that changes nothing: `ac=none`, `chunk=none`."""
    return isinstance(variant, Strategy) and type(variant).__module__.endswith(".none")


def _accepted(variant: Any, tolerance: Tolerance | None) -> Accepted | None:
    """Return what is accepted of the two: what the caller says, or the strategy declares."""
    declared = tolerance or (variant.tolerance if isinstance(variant, Strategy) else None)
    if declared is None:
        return None
    return Accepted(relative=declared.relative, parameters=declared.parameters, floor=declared.floor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(result: RankResult) -> list[RankResult]:
    """Return the results of all ranks, on each of them."""
    if not dist.is_initialized():
        return [result]
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


def _anywhere(seen: bool) -> bool:
    """Say whether something was seen on any rank."""
    if not dist.is_initialized():
        return seen
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, seen)
    return any(flags)

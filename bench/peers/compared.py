"""One peer beside `ac=budget` at that peer's own measured peak: bytes, FLOPs, gradients and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.peers.ours import Ours, trained_by
from bench.peers.workload import CannotRunError, Measured, Peer, Workload
from harness.measure.speed.timing import host_time_s, in_turns
from harness.records.statistics import Ratio, ratio_to_baseline
from harness.trial.assemble import Assembled
from harness.trial.compilation import compiling
from harness.trial.steps import train
from strategies.budget.plan import Plan

EQUAL_POINTS = 0.05
"""Points of a step's FLOPs up to which two are equal."""

_OF_PEERS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a peer that does not take a model raises: no two of them agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A peer and our plan at its peak; peaks are bytes of the whole step, costs percent of a step's FLOPs.

    Fields:
        workload, peer, setting: names.
        peak_bytes, plain_bytes: peak with the peer, and of the plain step; `None` where the peer did not run.
        extra: what the peer computes beyond a plain step.
        bound: no schedule of the eager step's operators within the peer's peak costs less.
        ours_bytes, ours: peak and cost of our plan, measured; `None` where we have no plan at that peak.
        executor: of our plan: `eager`, or `compiled` where that is cheaper, beside a peer that is compiled.
        difference: of the peer's gradients from the plain ones, relative.
        ours_difference: of ours.
        time, ours_time: step time / that of the plain step.
        ours_over_peer: our step time / the peer's.
        reason: why the peer did not run.
    """

    workload: str
    peer: str
    setting: str
    plain_bytes: int
    peak_bytes: int | None = None
    extra: float | None = None
    bound: float | None = None
    ours_bytes: int | None = None
    ours: float | None = None
    executor: str = ""
    difference: float | None = None
    ours_difference: float | None = None
    time: Ratio | None = None
    ours_time: Ratio | None = None
    ours_over_peer: Ratio | None = None
    reason: str = ""

    @property
    def share(self) -> float | None:
        """The peer's peak, of that without activation checkpointing."""
        return None if self.peak_bytes is None else self.peak_bytes / self.plain_bytes

    @property
    def points(self) -> float | None:
        """What the peer computes more than ours, in points."""
        return None if self.extra is None or self.ours is None else self.extra - self.ours

    @property
    def verdict(self) -> str:
        """Where ours stands: `ahead`, `equal`, `behind`, `no plan`; `not run` where the peer did not."""
        if self.extra is None:
            return "not run"
        if self.points is None:
            return "no plan"
        if abs(self.points) <= EQUAL_POINTS:
            return "equal"
        return "ahead" if self.points > 0 else "behind"


class Comparison:
    """The comparisons of one workload.

    Args:
        workload: what is trained.
        turns: timed steps of each; 0 times nothing.
    """

    def __init__(self, workload: Workload, turns: int) -> None:
        self.workload = workload
        self.ours = Ours(workload)
        self._turns = turns
        self._trainee = workload.trainee()
        self.plain = workload.measured(self._trainee)
        self._gradients = workload.gradients(self._trainee)

    def of(self, peer: Peer) -> Compared:
        """Return the comparison with a peer, which may not run here."""
        workload = self.workload
        named = partial(
            Compared,
            workload=workload.name,
            peer=peer.name,
            setting=peer.setting,
            plain_bytes=self.plain.peak_bytes,
        )
        experiment = workload.experiment(*peer.overrides)
        with compiling(experiment):
            try:
                theirs = workload.trainee(experiment, partial(peer.change, workload))
                measured = workload.measured(theirs)
            except CannotRunError as error:
                return named(reason=str(error))
            except _OF_PEERS as error:
                first_line = str(error).partition("\n")[0][:120]
                return named(reason=f"{type(error).__name__}: {first_line}")
            found = partial(
                named,
                peak_bytes=measured.peak_bytes,
                extra=self._extra(measured),
                bound=self.ours.bound_percent(measured.peak_bytes),
                difference=_difference(workload.gradients(theirs), self._gradients),
            )
            plan = self._plan(peer, measured)
            if plan is None:
                return found(**self._times(peer, [self._trainee, theirs]))
            planned = trained_by(plan, workload)
            ours = workload.measured(planned)
            return found(
                executor=plan.executor,
                ours_bytes=ours.peak_bytes,
                ours=self._extra(ours),
                ours_difference=_difference(workload.gradients(planned), self._gradients),
                **self._times(peer, [self._trainee, theirs, planned]),
            )

    def _plan(self, peer: Peer, measured: Measured) -> Plan | None:
        """Return our plan at a peer's peak: for compiled blocks where it costs less than the eager one."""
        budget_bytes = measured.peak_bytes
        plan = self.ours.at(budget_bytes)
        most = self._extra(measured) + EQUAL_POINTS
        if not peer.overrides or (plan is not None and plan.percent(plan.extra_flops) <= most):
            return plan
        found = [each for each in (plan, self.ours.compiled_at(budget_bytes)) if each is not None]
        return min(found, key=lambda each: each.extra_flops, default=None)

    def _extra(self, measured: Measured) -> float:
        return 100 * (measured.flops / self.plain.flops - 1)

    def _times(self, peer: Peer, trainees: Sequence[Assembled]) -> dict[str, Ratio]:
        """Return the ratios of step times; none of a compiled peer, whose operators run one by one here."""
        if not self._turns or peer.overrides:
            return {}
        batch = self.workload.batch(0)
        steps = [partial(train, trainee, batch) for trainee in trainees]
        plain, theirs, *ours = in_turns(steps, warmup=1, turns=self._turns, clock=host_time_s)
        ratios = {"time": ratio_to_baseline(theirs, plain)}
        for times in ours:
            ratios["ours_time"] = ratio_to_baseline(times, plain)
            ratios["ours_over_peer"] = ratio_to_baseline(times, theirs)
        return ratios


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference / the norm of what was expected."""
    pairs = zip(found, expected, strict=True)
    parts = torch.stack([torch.stack([(a - b).norm(), b.norm()]) for a, b in pairs])
    difference, whole = parts.norm(dim=0).tolist()
    return float(difference / whole)

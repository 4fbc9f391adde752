"""The proof of a trial: its links, from the variant to the plain model, each trained and compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from harness.experiment.experiment import Experiment
from harness.experiment.links import Link, chain
from harness.measure.parity.compare import Accepted, compare_steps
from harness.measure.parity.snapshot import Snapshot
from harness.measure.parity.snapshot import steps as trained_steps
from harness.models.base import Batch
from harness.records.parity_result import First, Parity
from harness.trial.assemble import Assembled

CONTROLS = 3
"""Pairs of plain models that are compared before a variant is blamed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prover:
    """What compares two experiments on one rank.

    Fields:
        assembled: makes a fresh model of an experiment, with the weights of every other one of its seed.
        batch: a step's batch on this rank.
        rank: recorded with differences.
        dp_rank: index of the rank's batch among all data-parallel ones.
        is_sequential: the baseline's steps wait in host memory, because two models do not fit.
        progress: told the number of steps done, and of all.
        earliest: returns the earliest of the steps that the ranks give; they all call it, with `None` for no
            step.
    """

    assembled: Callable[[Experiment], Assembled]
    batch: Callable[[int], Batch]
    rank: int
    dp_rank: int
    is_sequential: bool = False
    progress: Callable[[int, int], None] = lambda _done, _total: None
    earliest: Callable[[int | None], int | None] = lambda step: step

    def prove(self, experiment: Experiment) -> Parity:
        """Return how the links of `experiment` compare: the first one's numbers, and the others after it."""
        links = chain(experiment)
        total = sum(link.steps for link in links)
        found: list[Parity] = []
        for link in links:
            done = sum(parity.steps for parity in found)
            found.append(self.compare(link, done=done, total=total))
            gc.collect()  # before the next two models are built
        is_exact = all(parity.level == "bitwise" for parity in found)
        return replace(found[0], level="bitwise" if is_exact else "tolerance", chain=tuple(found[1:]))

    def compare(self, link: Link, *, done: int = 0, total: int | None = None) -> Parity:
        """Return how one link compares; `done` of `total` steps are reported as done before."""
        parity = self._compared(
            link,  # which lets go of both models
            self._reported(self._trained(link, link.variant), done, total or link.steps),
            count=link.steps,
        )
        return replace(parity, compared=link.compared, control=self._control(link, parity.first))

    def _control(self, link: Link, first: First | None) -> Parity | None:
        """Return how the plain model compares with itself where the variant differs, before that is blamed.

        What depends on threads or on the time of day may come out the same twice by chance, so that several
        pairs of fresh models are compared.
        """
        step = self.earliest(None if first is None else first.step)
        if step is None:
            return None
        for _ in range(CONTROLS):
            gc.collect()  # before the next two models are built
            control = self._compared(link, self._trained(link, link.baseline), count=step + 1)
            if self.earliest(None if control.first is None else control.first.step) is not None:
                break
        return control

    def _compared(self, link: Link, actual: Iterator[Snapshot], *, count: int) -> Parity:
        """Return how `actual` compares with a fresh baseline of `link`."""
        expected = self._trained(link, link.baseline)
        if self.is_sequential:
            expected = iter([snapshot.to_host() for snapshot in islice(expected, count)])
            actual = (snapshot.to_host() for snapshot in actual)
        return compare_steps(expected, actual, count=count, rank=self.rank, tolerance=_accepted(link))

    def _trained(self, link: Link, experiment: Experiment) -> Iterator[Snapshot]:
        """Yield what each step computes; the model lives as long as the iterator."""
        batches = map(self.batch, range(link.steps))
        yield from trained_steps(
            self.assembled(experiment), batches, seed=experiment.seed, dp_rank=self.dp_rank, whole=link.whole
        )

    def _reported(self, snapshots: Iterator[Snapshot], done: int, total: int) -> Iterator[Snapshot]:
        for step, snapshot in enumerate(snapshots, done):
            self.progress(step, total)
            yield snapshot
            del snapshot  # as in `trained_steps`


def _accepted(link: Link) -> Accepted | None:
    tolerance = link.tolerance
    if tolerance is None:
        return None
    return Accepted(
        relative=tolerance.relative,
        parameters=tolerance.parameters,
        floor=tolerance.floor,
        # one of the two may go forth where the other goes back
        stride=2 * link.variant.learning_rate
        if tolerance.floor and link.variant.optimizer == "adamw"
        else 0.0,
    )

"""The proof of a trial: its links, from the variant to the plain model, each trained and compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness.experiment.experiment import Experiment
from harness.experiment.links import Link, chain
from harness.measure.parity.compare import Accepted, compare_steps
from harness.measure.parity.snapshot import Snapshot
from harness.measure.parity.snapshot import steps as trained_steps
from harness.models.base import Batch
from harness.records.parity_result import Parity
from harness.trial.assemble import Assembled


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
    """

    assembled: Callable[[Experiment], Assembled]
    batch: Callable[[int], Batch]
    rank: int
    dp_rank: int
    is_sequential: bool = False
    progress: Callable[[int, int], None] = lambda _done, _total: None

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
        expected = self._trained(link, link.baseline)
        actual = self._trained(link, link.variant)
        if self.is_sequential:
            expected = iter([snapshot.to_host() for snapshot in expected])
            actual = (snapshot.to_host() for snapshot in actual)
        parity = compare_steps(
            expected,
            self._reported(actual, done, total or link.steps),
            count=link.steps,
            rank=self.rank,
            tolerance=_accepted(link),
        )
        return replace(parity, compared=link.compared)

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

"""The proof of a trial: its links, from the variant to the plain model, each trained and compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from harness.experiment.experiment import Experiment
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.module_outputs import first_wrong, module_outputs
from harness.measure.parity.snapshot import Snapshot
from harness.measure.parity.snapshot import steps as trained_steps
from harness.measure.probes.probing import CONTROLS
from harness.models.base import Batch, LossFunction
from harness.records.parity_result import First, Parity
from harness.trial.assemble import Assembled
from harness.trial.links import Link, chain
from harness.trial.without_dropout import WithoutDropout
from strategies import Tolerance

_UNREACHED = (
    "the tensor parallel plan was not compared with the dense model, which does not fit into a rank; "
    "prove the plan on fewer blocks"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prover:
    """A comparison of two experiments on one rank.

    Fields:
        assembled: makes a fresh model of an experiment, with the weights of every other one of its seed.
        batch: a step's batch on this rank.
        dp_rank: index of the rank's batch among all data-parallel ones.
        is_sequential: the baseline's steps wait in host memory, because two models do not fit.
        progress: told the number of steps done, and of all.
        earliest: returns the earliest of the steps that the ranks give; they all call it, with `None` for no
            step.
        dense: makes a fresh model of an experiment that each rank of `tp`, `cp`, `ep` and `pp` computes as a
            whole.
        whole_batch: a step's batch of whole sequences, of which ranks of `cp` hold parts; `batch` where there
            are none.
        averaged: returns a loss with the value of the mean over the ranks of `cp`.
        with_inductor: makes a fresh model of an experiment, compiled with these options of Inductor.
        once: returns what a comparison with the dense model gave, which is the same for all variants; it
            calls the function that it is given where nobody knows.
    """

    assembled: Callable[[Experiment], Assembled]
    batch: Callable[[int], Batch]
    rank: int
    dp_rank: int
    is_sequential: bool = False
    progress: Callable[[int, int], None] = lambda _done, _total: None
    earliest: Callable[[int | None], int | None] = lambda step: step
    dense: Callable[[Experiment], Assembled] | None = None
    whole_batch: Callable[[int], Batch] | None = None
    averaged: Callable[[LossFunction], LossFunction] = lambda loss: loss
    with_inductor: Callable[[Sequence[str], Experiment], Assembled] | None = None
    once: Callable[[Link, Callable[[], Parity | None]], Parity | None] = lambda _link, compare: compare()

    def prove(self, experiment: Experiment) -> Parity:
        """Return how the links of `experiment` compare: the first one's numbers, and the others after it.

        The level is that of the links to the model as the mesh shards it, which the variant decides.
        """
        links = chain(experiment)
        total = sum(link.steps for link in links)
        found: list[Parity] = []
        for link in links:
            if link.is_dense:
                break
            done = sum(parity.steps for parity in found)
            found.append(self.compare(link, done=done, total=total))
            gc.collect()  # before the next two models are built
        is_exact = all(parity.level == "bitwise" for parity in found)
        proven = replace(found[0], level="bitwise" if is_exact else "tolerance", chain=tuple(found[1:]))
        return self._reaching(links[-1], proven, total) if links[-1].is_dense else proven

    def compare(self, link: Link, *, done: int = 0, total: int | None = None) -> Parity:
        """Return how one link compares; `done` of `total` steps are reported as done before."""
        parity = self._compared(
            link,  # which lets go of both models
            self._reported(self._trained(link, link.variant), done, total or link.steps),
            count=link.steps,
        )
        control = self._control(link, parity.first)
        # with `pp` nobody calls the modules one after the other, with `cp` the two read other batches, and
        # with `ep` experts other tokens
        mesh = link.variant.mesh
        is_alike = mesh.pp * mesh.cp * mesh.ep == 1
        is_named = link.is_dense and is_alike and control is not None  # on all ranks or on none
        return replace(
            parity,
            compared=link.compared,
            control=control,
            first_module=self._first_module(link) if is_named else "",
        )

    def _reaching(self, link: Link, proven: Parity, total: int) -> Parity:
        """Return `proven` with the link to the dense model, or with why there is none."""
        parity = self.once(link, partial(self._against_dense, link, total))
        if parity is None:
            return replace(proven, unreached=_UNREACHED)
        return replace(proven, chain=(*proven.chain, parity))

    def _against_dense(self, link: Link, total: int) -> Parity | None:
        """Return how the twin compares with the dense model; `None` where that does not fit."""
        try:
            parity: Parity | None = self.compare(link, done=total - link.steps, total=total)
        except torch.OutOfMemoryError:
            parity = None
        gc.collect()
        return parity if self.earliest(0 if parity is None else None) is None else None

    def _first_module(self, link: Link) -> str:
        """Return the first module of the variant that gives something else than the dense model's does."""
        assert link.tolerance is not None
        whole, split = (
            module_outputs(
                self._made(link, is_dense=is_dense),
                self.batch(0).parts()[0],
                seed=link.variant.seed,
                dp_rank=self.dp_rank,
            )
            for is_dense in (True, False)
        )
        mesh = link.variant.mesh
        part = mesh.coordinate(self.rank).tp
        return first_wrong(whole, split, relative=link.tolerance.relative, part=part, parts=mesh.tp)

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
            control = self._compared(link, self._baseline(link), count=step + 1)
            if self.earliest(None if control.first is None else control.first.step) is not None:
                break
        return control

    def _compared(self, link: Link, actual: Iterator[Snapshot], *, count: int) -> Parity:
        """Return how `actual` compares with a fresh baseline of `link`."""
        expected = self._baseline(link)
        if self.is_sequential or link.is_dense:
            expected = iter([snapshot.to_host() for snapshot in islice(expected, count)])
            actual = (snapshot.to_host() for snapshot in actual)
        mesh = link.variant.mesh
        if link.is_dense and mesh.pp * mesh.ep > 1:  # of the whole a rank has its stages, or its experts
            own = list(islice(actual, count))
            share = self.dp_rank % mesh.ep  # ranks that share experts are next to each other
            expected = (whole.within(part, share, mesh.ep) for whole, part in zip(expected, own, strict=True))
            actual = iter(own)
        return compare_steps(expected, actual, count=count, rank=self.rank, tolerance=accepted_by(link))

    def _baseline(self, link: Link) -> Iterator[Snapshot]:
        return self._trained(link, link.baseline, is_dense=link.is_dense)

    def _trained(self, link: Link, experiment: Experiment, *, is_dense: bool = False) -> Iterator[Snapshot]:
        """Yield what each step computes; the model lives as long as the iterator."""
        is_whole = is_dense and link.variant.mesh.cp > 1
        batches = map(self.whole_batch if is_whole and self.whole_batch else self.batch, range(link.steps))
        trainee = self._made(link, is_dense=is_dense) if link.is_dense else self._fresh(link, experiment)
        taken = trained_steps(trainee, batches, seed=experiment.seed, dp_rank=self.dp_rank, whole=link.whole)
        if not (is_whole and experiment.model.has_outputs_of_parts):
            yield from taken
            return
        parts = link.variant.mesh.cp
        for snapshot in taken:
            yield snapshot.of_part(self.dp_rank % parts, parts)
            del snapshot  # as in `trained_steps`

    def _fresh(self, link: Link, experiment: Experiment) -> Assembled:
        if link.inductor and self.with_inductor is not None:
            return self.with_inductor(link.inductor, experiment)
        return self.assembled(experiment)

    def _made(self, link: Link, *, is_dense: bool) -> Assembled:
        """Return the dense model of a link, or its variant, neither of which drops anything out."""
        assert self.dense is not None, "a mesh with tp or pp has a dense model"
        made = (self.dense if is_dense else self.assembled)(link.variant)
        loss = made.loss if is_dense else self.averaged(made.loss)
        return replace(made, autocast=WithoutDropout, loss=loss)

    def _reported(self, snapshots: Iterator[Snapshot], done: int, total: int) -> Iterator[Snapshot]:
        for step, snapshot in enumerate(snapshots, done):
            self.progress(step, total)
            yield snapshot
            del snapshot  # as in `trained_steps`


def accepted_by(link: Link) -> Tolerance | None:
    """Return how far the two of a link may be apart; `None` asks for equal bits."""
    tolerance = link.tolerance
    if tolerance is None or not tolerance.floor or link.variant.optimizer != "adamw":
        return tolerance
    # one of the two may go forth where the other goes back
    return replace(tolerance, stride=2 * link.variant.learning_rate)

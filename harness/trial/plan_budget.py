"""The plan of a strategy that plans from a step: made in a trial, before its model is built."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from harness.experiment.experiment import Experiment, name_of
from harness.measure.step import instrument, runnable_step, write_plan
from harness.models.base import Batch
from harness.records.files import make_folder, remove, write_atomically
from harness.trial.assemble import Assembled
from harness.trial.plain_model import PlainModel
from harness.trial.plan_files import file_of, plan_of_rank
from harness.trial.planned_step import planned_step
from harness.trial.steps import UNMEASURED_STEPS, warm_up
from strategies import (
    PlansFromStep,
    RunnableStep,
    Strategy,
    StrategyError,
    ac_variants,
    chunk_variants,
    held_chunks,
)

Warmed: TypeAlias = Callable[[Assembled, Callable[[int], Batch]], None]
"""Lets a fresh model take the steps that nobody watches, of batches that it is given by number."""

PLAN_FILE = "plan.json"
"""Name of the file in the folder of a trial."""

_ATTEMPTS = 5
"""Plans that are measured, where the bytes of what a compiler generates cannot be counted."""

_CHOICES = frozenset({"aten.topk.default"})
"""Operators by which tokens choose experts: another choice in backward would be silently wrong."""

_OFFERS = "chunks"
"""Name of a folder next to it, as long as the plan is made."""


def with_plan(
    experiment: Experiment,
    assemble: Callable[[Experiment], Assembled],
    batch: Callable[[int], Batch],
    file: Path,
    *,
    device: torch.device,
    rank: int = 0,
    warmed: Warmed = warm_up,
    most: Callable[..., tuple[int, ...]] | None = None,
) -> Experiment:
    """Return `experiment` with the plan of its AC in `file`, which rank 0 writes, where its AC plans.

    The plain model takes a step on all ranks, and rank 0 plans for what it sees. Where chunks are left to
    that plan, the model takes the step once more for each plan of chunks that rank 0 offers.
    Where ranks take unlike steps (`Mesh.kind`), the first one of each kind plans, for one budget, and there
    are as many files (`file_of`). No plan repeats a collective, so that ranks with other plans still meet.

    Args:
        assemble: makes a fresh model.
        batch: returns this rank's share of a step's batch.
        warmed: lets a model take the steps that nobody watches.
        most: function of `RunnableStep`; `None` asks the other ranks.

    Raises:
        StrategyError: there is no plan, on rank 0; or the one that is given has chunks that nobody asks for.
    """
    ac = experiment.ac.step_planner
    if ac is None:
        return experiment
    mesh = experiment.mesh
    if ac.plan_file is not None:
        file = file_of(Path(ac.plan_file), mesh, rank)
        return carrying_out(replace(experiment, ac=plan_of_rank(experiment.ac, mesh, rank)), file)
    file = file_of(file, mesh, rank)
    asked = _Asked(
        experiment=experiment,
        assemble=assemble,
        batch=batch,
        warmed=warmed,
        most=most,
    )
    if experiment.compile == "inductor":
        _write_measured(ac, asked, file, device)
    else:
        with _offered(experiment, batch(0).parts()[0], device, file.with_name(_OFFERS)) as offers:
            firsts = mesh.first_ranks()
            write_plan(ac, asked.steps(offers), file, plans=rank in firsts if len(firsts) > 1 else None)
            _meet()
    return carrying_out(replace(experiment, ac=ac.with_plan(file)), file)


def _write_measured(ac: PlansFromStep, asked: _Asked, file: Path, device: torch.device) -> None:
    """Write a plan whose generated kernels keep the budget.

    A plan counts the bytes of operators. Inductor's kernels join some, and hold what they read until all of
    it is computed, so the bytes that they need are measured, and a plan is made that leaves room for them.

    Raises:
        StrategyError: there is no plan, or none of those that were measured keeps the budget.
    """
    spare_bytes = 0
    for attempt in range(_ATTEMPTS):
        tried = file.with_name(f"{attempt}-{file.name}")  # what is compiled for one name is compiled once
        write_plan(ac, asked.steps([]), tried, spare_bytes=spare_bytes)
        _meet()
        plan = json.loads(tried.read_text(encoding="utf-8"))
        (peak_bytes,) = _most(asked.peak_bytes(ac.with_plan(tried)), device=device)
        if _is_first():
            tried.replace(file)
        _meet()
        if peak_bytes <= plan["budget_bytes"]:
            return
        spare_bytes = peak_bytes - plan["predicted_peak_bytes"]  # more than what was left
    problem = (
        f"the kernels of each of {_ATTEMPTS} plans need more than {plan['budget_bytes']} bytes, those of the "
        f"last one {peak_bytes}"
    )
    raise StrategyError("compile", f"{problem}; use compile=aot_eager, or a larger budget")


def carrying_out(experiment: Experiment, file: Path) -> Experiment:
    """Return `experiment` with the chunks of the plan in `file`, where it leaves them to that plan.

    Raises:
        StrategyError: the plan has chunks, and none are asked for.
    """
    offers = experiment.chunk.chunk_offers
    if offers is not None:
        return replace(experiment, chunk=offers.with_plan(file) or chunk_variants["none"]())
    if held_chunks(file) is not None and name_of(experiment.chunk) == "none":
        problem = f"{str(file)!r} counts on chunks; use chunk=budget, or a plan of chunk=none"
        raise StrategyError("ac.plan_file", problem)
    return experiment


def beside_recomputation(experiment: Experiment) -> Experiment:
    """Return `experiment` with every block recomputed and no chunks: with this, chunks are planned.

    A plan that follows keeps more of blocks, hardly less; what it cannot lower is what chunks are for.
    """
    names = ("layers_fqn", "module_classes")
    of_blocks = {name: getattr(experiment.ac, name) for name in names if hasattr(experiment.ac, name)}
    return replace(experiment, ac=ac_variants["full"](**of_blocks), chunk=chunk_variants["none"]())


@contextmanager
def _offered(
    experiment: Experiment, sample: Batch, device: torch.device, folder: Path
) -> Iterator[list[Path]]:
    """Lend the files of the plans of chunks to choose from, which rank 0 makes; none where nobody asks."""
    chunk = experiment.chunk.chunk_offers
    if chunk is None:
        yield []
        return
    if _is_first():
        remove(folder, within=folder.parent)  # of an attempt that was cut off
        make_folder(folder, within=folder.parent)
        plain = PlainModel.of(experiment, device)
        step = planned_step(beside_recomputation(experiment), plain, sample, device)
        for number, offer in enumerate(chunk.offers(plain.model, sample.inputs, step)):
            write_atomically(folder / f"{number}.json", json.dumps({"chunk": offer}), within=folder.parent)
    _meet()
    yield sorted(folder.iterdir())
    if _is_first():
        remove(folder, within=folder.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The way in which the steps of a plan are made.

    Fields:
        assemble: makes a fresh model.
        batch: returns this rank's share of a step's batch.
        warmed, most: as of `with_plan`.
    """

    experiment: Experiment
    assemble: Callable[[Experiment], Assembled]
    batch: Callable[[int], Batch]
    warmed: Warmed
    most: Callable[..., tuple[int, ...]] | None = None

    def peak_bytes(self, ac: Strategy) -> int:
        """Return the peak of the step with a plan, on this rank."""
        trainee = self.assemble(replace(self.experiment, ac=ac))
        self.warmed(trainee, self.batch)
        peak_bytes = instrument(trainee, self.batch(UNMEASURED_STEPS)).memory.peak_bytes
        trainee.zero_grad()
        del trainee
        gc.collect()
        return peak_bytes

    def steps(self, offers: Sequence[Path]) -> Iterator[RunnableStep]:
        """Yield the step without AC and chunks, then with the chunks of each offer; one model at a time."""
        plain = self.experiment.plain().uncompiled()
        yield from self._step(plain, None)
        for offer in offers:
            offering = self.experiment.chunk.chunk_offers
            assert offering is not None, "it has made the offer"
            chunk = offering.with_plan(offer)
            assert chunk is not None, "it is an offer of chunks"
            told = json.loads(offer.read_text(encoding="utf-8"))["chunk"]
            yield from self._step(replace(plain, chunk=chunk), told)

    def _step(self, experiment: Experiment, chunk: Mapping[str, Any] | None) -> Iterator[RunnableStep]:
        """Yield the step of a fresh model, and forget it."""
        trainee = self.assemble(experiment)
        self.warmed(trainee, self.batch)
        pipeline, batch = trainee.pipeline, self.batch(UNMEASURED_STEPS)
        step = runnable_step(trainee, batch, {} if pipeline is None else pipeline.stages)
        step = replace(step, compiler=self.experiment.compile, chunk=chunk)
        if self.experiment.mesh.ep > 1:
            step = replace(step, lasting=_CHOICES)
        if len(self.experiment.mesh.first_ranks()) > 1:
            step = replace(step, most=self.most or partial(_most, device=step.device))
        yield step
        trainee.zero_grad()
        del trainee, step, pipeline
        gc.collect()


def _most(*numbers: int, device: torch.device) -> tuple[int, ...]:
    """Return the largest of the numbers that all ranks give, in their order."""
    if not dist.is_initialized():
        return numbers
    held = torch.tensor(numbers, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return tuple(map(int, held.tolist()))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()

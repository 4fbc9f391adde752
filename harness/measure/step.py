"""One training step, run under the meters or under the allocator's eyes alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.measure.gloo.wait import settled_collectives
from harness.measure.in_place_operators import AsUnwatched
from harness.measure.memory import allocator
from harness.measure.memory.allocator import LiveTotals
from harness.measure.memory.compiled_buffers import buffers_seen
from harness.measure.memory.locator import ASKERS, Locator
from harness.measure.memory.storage_history import StorageHistory
from harness.measure.memory.totals import StepTotals, standing
from harness.measure.rng import seeded
from harness.measure.sharding_rules import unseen_sharding_rules
from harness.measure.trainee import BackwardPart, Trainee, Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs, CompiledWork
from harness.measure.work.counter import work_of
from harness.measure.work.policy_answers import answers_heard
from harness.models.base import Batch
from harness.records.measured import Allocator, MeasuredMemory, MeasuredWork, StageAction
from strategies.base import PlansFromStep, RunnableStep, alone
from strategies.estimate.patched import Wrappings, without_collector
from strategies.estimate.tensors import plain_tensors, tensors_held_by
from strategies.step.ledger import Kind, Ledger
from strategies.step.live_storages import LiveStorages, WorkspaceProbe
from strategies.step.position import Phase
from strategies.step.step_recorder import RecordedOperator, StepRecorder


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The measurements of one instrumented training step on one rank.

    Fields:
        memory, work: what the two meters counted; the allocator's numbers are not among them.
        history: storages of the step, of which `memory` is the sum.
        operators: operators of the step, of which `work` is the sum.
        ledger: lives of the storages that they touched.
        parts: what each of these storages is, one of `PEAK_PARTS`.
        compiled: what `work` has besides them; `None` where nothing is compiled.
        microbatch_bytes: the most activations that one forward of a micro-batch has left.
        forwards: forward calls of each block by what asked for them.
        actions: those of the schedule, if there is one.
        live: what the device's allocator should have seen, for `allocator_truth`.
        workspaces: the private memory of operators, or `None` where no probe has looked for it.
    """

    memory: MeasuredMemory
    work: MeasuredWork
    history: StorageHistory
    operators: Sequence[RecordedOperator]
    ledger: Ledger
    parts: Sequence[str]
    compiled: CompiledWork | None
    microbatch_bytes: int
    forwards: dict[str, dict[str, int]]
    actions: tuple[StageAction, ...]
    live: LiveTotals
    workspaces: Workspaces | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """Memory that operators held for themselves, of which no storage tells.

    Fields:
        peak_bytes: highest total of live storages and workspaces together: what the allocator should see.
        largest_by_op: the most that one call of each operator held, for those that held any.
    """

    peak_bytes: int
    largest_by_op: dict[str, int]


def instrument(
    trainee: Trainee,
    batch: Any,
    *,
    probe: WorkspaceProbe | None = None,
    around: Callable[[Locator], AbstractContextManager[object]] = nullcontext,
    seed: int = 0,
) -> StepReport:
    """Run one training step and record it.

    Run one step before: the first makes optimizer state, FSDP's buffers and DTensor's propagation cache.

    Args:
        batch: what to train it on; its tensors lie on the device.
        probe: sees the private memory of operators, to say where a difference to the allocator comes from.
        around: makes a context of the step from what says where it is.
        seed: what random numbers the step draws.
    """
    device = compute_device(trainee, batch)
    locator = Locator(trainee.model, trainee.blocks)
    recorder = StepRecorder(locator, device=device.type, probe=probe)
    totals = StepTotals(trainee, recorder)
    with (
        _repeatable(trainee, device, seed),
        settled_collectives(),
        unseen_sharding_rules(),
        locator,
        around(locator),
        answers_heard() as answers,
        recorder,
        AsUnwatched(locator.wrappings),
        _compiled_code(trainee.compiled, locator, recorder) as compiled,
    ):
        totals.start(batch)
        _step(trainee, batch, _Meters(totals=totals, locator=locator))
    history, beyond = totals.history(), compiled()
    work = work_of((each.work for each in recorder.operators), locator.calls, device=device.type)
    forwards = locator.calls_by_asker.values()
    by_asker = {asker: sum(counts[asker] for counts in forwards) for asker in ASKERS}
    work = replace(work, recomputations=by_asker, policy_answers=dict(answers))
    return StepReport(
        memory=history.memory(),
        work=work if beyond is None else beyond.beside(work),
        history=history,
        operators=recorder.operators,
        ledger=recorder.ledger,
        parts=totals.parts(),
        compiled=beyond,
        microbatch_bytes=totals.microbatch_bytes,
        forwards=locator.calls_by_asker,
        actions=history.actions(totals.actions),
        live=totals.live_totals(device.type),
        workspaces=None if probe is None else _workspaces(recorder.ledger),
    )


def allocator_truth(trainee: Trainee, batch: Any, live: LiveTotals) -> Allocator | None:
    """Run one training step under the allocator's eyes alone; `None` on a device without allocator.

    Args:
        live: `StepReport.live` of the instrumented step, to which the allocator is compared.
    """
    device = compute_device(trainee, batch)
    with _repeatable(trainee, device), settled_collectives():
        return allocator.measure(lambda: _step(trainee, batch), device=device.type, live=live)


def runnable_step(
    trainee: Trainee, batch: Any, stages: Mapping[int, nn.Module] | None = None
) -> RunnableStep:
    """Return the step that `instrument` watches, for who watches it otherwise.

    Of several micro-batches it is the last one, to whose gradients those of the others have accumulated: none
    before it holds more, unless gradients are kept unsharded until then. In a pipeline it is all of them, in
    the order of its schedule.

    Args:
        trainee, batch: as of `instrument`, with the step before that it asks for.
        stages: the stages of a pipeline that this rank has, by number.
    """
    wrappings = Wrappings()
    *others, last = batch.parts() if isinstance(batch, Batch) and not stages else (batch,)

    def run() -> None:
        with AsUnwatched(wrappings):
            if not others:
                _step(trainee, batch)
                return
            forward_and_backward(trainee, last, _UNWATCHED, microbatches=len(others) + 1)
            trainee.update()

    @contextmanager
    def around() -> Iterator[None]:
        with _repeatable(trainee, device), settled_collectives(), unseen_sharding_rules():
            yield

    device = compute_device(trainee, batch)
    return RunnableStep(
        run=run,
        model=trainee.model,
        device=device,
        standing=standing(trainee, batch, has_gradients=bool(others)),
        around=around,
        unwrapped=wrappings.lifted,
        stages=stages or {},
    )


def write_plan(
    variant: PlansFromStep,
    steps: Iterable[RunnableStep],
    file: Path,
    *,
    spare_bytes: int = 0,
    plans: bool | None = None,
) -> None:
    """Let one rank plan for what it sees of steps that all ranks take, or one of each kind of step.

    Args:
        steps: a step of the plain model, after one that has made optimizer state; then the same in chunks of
            several plans.
        file: where the rank that plans writes it.
        spare_bytes: bytes below its budget that the plan is to stay.
        plans: whether this rank plans, as the first one of each kind does; `None`: rank 0 does.

    Raises:
        StrategyError: the model has not what is planned for; or there is no plan, on a rank that plans.
    """
    checked = _checked(variant, steps)
    if (not dist.is_initialized() or dist.get_rank() == 0) if plans is None else plans:
        variant.write_best_plan(checked, file, spare_bytes=spare_bytes)
        return
    most: Callable[..., tuple[int, ...]] = alone
    for step in checked:
        variant.attend_plan(step)
        most = step.most
    most(0, 0)  # ranks that plan ask all others


def _checked(variant: PlansFromStep, steps: Iterable[RunnableStep]) -> Iterator[RunnableStep]:
    for step in steps:
        for model in step.models:
            variant.check_model(model)
        yield step


def compute_device(trainee: Trainee, batch: Any) -> torch.device:
    """Return the device that holds the batch; of a batch without tensors, that of the parameters."""
    # not the parameters' device at once: FSDP may keep those on the host
    held = chain(tensors_held_by(batch), trainee.model.parameters())
    return next(plain_tensors(held)).device


@contextmanager
def _compiled_code(
    graphs: CompiledGraphs | None, locator: Locator, live: LiveStorages
) -> Iterator[Callable[[], CompiledWork | None]]:
    """Watch compiled functions as they run without meters; give what tells their own work.

    Raises:
        RuntimeError: something was compiled, and nothing of it ran.
    """
    if graphs is None:
        yield lambda: None
        return
    before = graphs.runs
    graphs.entered = locator.wrappings.lifted
    try:
        with buffers_seen(live):
            yield lambda: graphs.work_since(before)
    finally:
        graphs.entered = nullcontext
    if len(graphs) and graphs.runs == before:
        raise RuntimeError("compiled functions did not run under the meters")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meters(Watcher):
    """The meters of a step, told where it is."""

    totals: StepTotals
    locator: Locator

    def on_dropped(self) -> None:
        self.totals.on_dropped()

    def on_action(self, action: str) -> None:
        self.totals.actions.append(action)

    def enter(self, phase: Phase, part: BackwardPart = "input") -> None:
        self.locator.phase = phase
        self.locator.asked_by = part if phase == "backward" else "forward"
        if phase == "forward":
            self.totals.before_forward()

    def on_forward(self, outputs: Any, loss: Tensor | None) -> None:
        self.totals.on_forward((outputs, loss))

    def on_backward(self) -> None:
        self.totals.on_backward()


_UNWATCHED = Watcher()


def _step(trainee: Trainee, batch: Any, watcher: Watcher = _UNWATCHED) -> None:
    trainee.zero_grad()
    watcher.on_dropped()
    trainee.step(batch, watcher)
    watcher.enter("optimizer")
    trainee.update()


def _workspaces(ledger: Ledger) -> Workspaces:
    return Workspaces(
        peak_bytes=ledger.peak(lambda life: life.kind is not Kind.BACKEND).nbytes,
        largest_by_op=ledger.largest(lambda life: life.kind is Kind.WORKSPACE),
    )


@contextmanager
def _repeatable(trainee: Trainee, device: torch.device, seed: int = 0) -> Iterator[None]:
    """Take a step that can be taken again: routing and dropout decide what is alive.

    Random numbers start from one seed and go on afterwards as if nothing had been. The learning rate is 0:
    every operator of the update runs and moves no parameter. Garbage is collected before the step and not in
    it, so reference cycles die at no random moment.
    """
    groups = trainee.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    gc.collect()
    try:
        for group in groups:
            group["lr"] = 0.0
        with without_collector(), seeded(seed, step=0, dp_rank=0, device=device):
            yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

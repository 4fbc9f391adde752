"""One training step, run under the meters or under the allocator's eyes alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.measure.gloo.wait import settled_collectives
from harness.measure.in_place_operators import AsUnwatched
from harness.measure.memory import allocator
from harness.measure.memory import live_storages as memory
from harness.measure.memory.allocator import AllocatorReport, LiveTotals
from harness.measure.memory.ledger import Kind, Ledger
from harness.measure.memory.live_storages import (
    LiveStorages,
    MemoryReport,
    SavedStorage,
    WorkspaceProbe,
)
from harness.measure.memory.locator import Locator, Phase
from harness.measure.rng import seeded
from harness.measure.tensors import gradients_of, optimizer_state_of, parameters_of, plain_tensors, tensors_in
from harness.measure.work.counter import WorkCounter, WorkReport


class Trainee(Protocol):
    """A model with what it takes to train it; the meters know no more of a trial."""

    @property
    def model(self) -> nn.Module:
        """The module as it is called, wrappers included."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """FQN of each block to the block of `model` itself."""

    def forward(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the outputs of the model and the scalar loss."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`."""

    def update(self) -> None:
        """Step the optimizer."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one instrumented training step showed on one rank.

    Fields:
        memory, work: the reports of the two meters.
        live: what the device's allocator should have seen, for `allocator_truth`.
        workspaces: the private memory of operators, or `None` where no probe has looked for it.
    """

    memory: MemoryReport
    work: WorkReport
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
    is_host: Callable[[], bool] = lambda: False,
    probe: WorkspaceProbe | None = None,
) -> StepReport:
    """Run one training step under both meters.

    Run one step before: the first makes optimizer state, FSDP's buffers and DTensor's propagation cache.

    Args:
        trainee: what to train.
        batch: what to train it on; its tensors lie on the device.
        is_host: whether what is allocated now is a host copy, for offloading on CPU.
        probe: sees the private memory of operators, to say where a difference to the allocator comes from.
    """
    device = compute_device(batch)
    locator = Locator(trainee.model, trainee.blocks)
    live = LiveStorages(locator, device=device.type, is_host=is_host, probe=probe)
    work = WorkCounter(locator)
    meter = _Meter(trainee, live, locator)
    with _repeatable(trainee, device), settled_collectives(), locator, live, work, AsUnwatched():
        meter.start(batch)
        _step(trainee, batch, meter)
    return StepReport(
        memory=meter.report(),
        work=work.report(),
        live=meter.live_totals(device.type),
        workspaces=None if probe is None else _workspaces(live.ledger),
    )


def allocator_truth(trainee: Trainee, batch: Any, live: LiveTotals) -> AllocatorReport | None:
    """Run one training step under the allocator's eyes alone; `None` on a device without allocator.

    Args:
        trainee, batch: those of the instrumented step.
        live: `StepReport.live` of the instrumented step, to which the allocator is compared.
    """
    device = compute_device(batch)
    with _repeatable(trainee, device), settled_collectives():
        return allocator.measure(lambda: _step(trainee, batch, _Unobserved()), device=device.type, live=live)


def compute_device(batch: Any) -> torch.device:
    """Return the device that holds the batch."""
    return next(plain_tensors(tensors_in(batch))).device


class _Observer(Protocol):
    def on_phase(self, phase: Phase) -> None: ...
    def on_forward(self, returned: tuple[Any, Tensor]) -> None: ...
    def on_backward(self) -> None: ...


def _step(trainee: Trainee, batch: Any, observer: _Observer) -> None:
    """Run a training step; like a careful training loop, drop the outputs before backward."""
    trainee.zero_grad()
    outputs, loss = trainee.forward(batch)
    observer.on_forward((outputs, loss))
    del outputs
    observer.on_phase("backward")
    trainee.backward(loss)
    observer.on_backward()
    del loss
    observer.on_phase("optimizer")
    trainee.update()


class _Unobserved:
    def on_phase(self, phase: Phase) -> None:
        pass

    def on_forward(self, returned: tuple[Any, Tensor]) -> None:
        pass

    def on_backward(self) -> None:
        pass


class _Meter:
    """Takes the numbers that exist only at one moment of a step."""

    def __init__(self, trainee: Trainee, live: LiveStorages, locator: Locator) -> None:
        self._trainee = trainee
        self._live = live
        self._locator = locator
        self._parameter_bytes = 0
        self._stale_bytes = 0
        self._gradient_bytes = 0
        self._saved: list[SavedStorage] = []

    def start(self, batch: Any) -> None:
        model = self._trainee.model
        self._parameter_bytes = memory.storage_bytes(parameters_of(model))
        self._stale_bytes = memory.storage_bytes(gradients_of(model))
        self._live.stand(
            chain(
                parameters_of(model),
                plain_tensors(model.buffers()),
                gradients_of(model),
                optimizer_state_of(self._trainee.optimizer),
                plain_tensors(tensors_in(batch)),
            )
        )

    def on_phase(self, phase: Phase) -> None:
        self._locator.phase = phase

    def on_forward(self, returned: tuple[Any, Tensor]) -> None:
        memory.mark_forward(self._live, self._trainee.model, returned)
        self._saved = memory.saved_storages(self._live.ledger)

    def on_backward(self) -> None:
        memory.mark_backward(self._live, self._trainee.model)
        self._gradient_bytes = memory.storage_bytes(gradients_of(self._trainee.model))

    def report(self) -> MemoryReport:
        ledger = self._live.ledger
        peak = ledger.peak(memory.is_on_device)
        return MemoryReport(
            saved_bytes=sum(storage.bytes for storage in self._saved),
            peak_bytes=peak.nbytes,
            activation_peak_bytes=ledger.peak(memory.is_activation).nbytes,
            peak_phase=peak.phase,
            peak_module=peak.module,
            parameter_bytes=self._parameter_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=memory.storage_bytes(optimizer_state_of(self._trainee.optimizer)),
            host_peak_bytes=ledger.peak(memory.is_on_host).nbytes,
            largest_saved=tuple(self._saved[: memory.LARGEST_SAVED]),
            saved_by_module=memory.by_module(self._saved),
            timeline=memory.timeline(ledger),
        )

    def live_totals(self, device: str) -> LiveTotals:
        ledger = self._live.ledger
        # on CPU the allocator hands out host copies too
        seen = memory.is_on_device if device == "cuda" else memory.is_storage
        return LiveTotals(
            standing_bytes=ledger.start_bytes(seen),
            stale_bytes=self._stale_bytes,
            peak_bytes=ledger.peak(seen).nbytes,
        )


def _workspaces(ledger: Ledger) -> Workspaces:
    return Workspaces(
        peak_bytes=ledger.peak(lambda life: life.kind is not Kind.BACKEND).nbytes,
        largest_by_op=ledger.largest(lambda life: life.kind is Kind.WORKSPACE),
    )


@contextmanager
def _repeatable(trainee: Trainee, device: torch.device) -> Iterator[None]:
    """Take a step that can be taken again: routing and dropout decide what is alive.

    Random numbers start from one seed and go on afterwards as if nothing had been. The learning rate is 0:
    every operator of the update runs and moves no parameter. Garbage is collected before the step and not in
    it, so reference cycles die at no random moment.
    """
    groups = trainee.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for group in groups:
            group["lr"] = 0.0
        with seeded(0, step=0, dp_rank=0, device=device):
            yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if was_enabled:
            gc.enable()

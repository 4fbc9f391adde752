"""The memory of a training step by the definitions of the record, taken while the step runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from harness.measure.memory.allocator import LiveTotals
from harness.measure.trainee import Trainee
from harness.records.measured import PEAK_PARTS, MeasuredMemory, Moment, SavedTensor
from strategies.estimate.ledger import (
    Kind,
    Ledger,
    Life,
    is_activation,
    is_on_device,
    is_on_host,
    is_saved,
    is_storage,
)
from strategies.estimate.live_storages import LiveStorages
from strategies.estimate.liveness import key_of
from strategies.estimate.tensors import (
    gradients_of,
    optimizer_state_of,
    parameters_of,
    plain_tensors,
    tensors_held_by,
)

LARGEST_SAVED = 20
MOST_MOMENTS = 200


def standing(trainee: Trainee, batch: Any) -> tuple[Tensor, ...]:
    """Return the plain tensors that stand before a step, but for the gradients of the step before."""
    parts = _standing_by_part(trainee, batch)
    return tuple(chain.from_iterable(parts[part] for part in parts if part != "gradients"))


class StepTotals:
    """Totals of one step of `trainee`; call each method at its moment of the step.

    Args:
        trainee: what is trained.
        live: the meter, which has been entered.
    """

    def __init__(self, trainee: Trainee, live: LiveStorages) -> None:
        self._trainee = trainee
        self._live = live
        self._parameter_bytes = 0
        self._stale_bytes = 0
        self._gradient_bytes = 0
        self._saved: list[SavedTensor] = []
        self._numbers: dict[str, set[int]] = {}

    def start(self, batch: Any) -> None:
        """Enter what stands before the step."""
        model = self._trainee.model
        self._parameter_bytes = _storage_bytes(parameters_of(model))
        self._stale_bytes = _storage_bytes(gradients_of(model))
        parts = _standing_by_part(self._trainee, batch)
        self._numbers = {part: self._live.add_standing(tensors) for part, tensors in parts.items()}

    def on_forward(self, returned: tuple[Any, Tensor]) -> None:
        """Take what forward has left; call it when forward has returned."""
        mark_forward(self._live, self._trainee.model, returned)
        self._saved = _saved_tensors(self._live.ledger)
        lives = enumerate(self._live.ledger.lives)
        self._numbers["saved"] = {number for number, life in lives if is_saved(life)}

    def on_backward(self) -> None:
        """Take the gradients; call it when backward has returned."""
        mark_backward(self._live, self._trainee.model)
        self._gradient_bytes = _storage_bytes(gradients_of(self._trainee.model))

    def memory(self) -> MeasuredMemory:
        """Return the bytes of the step, at its end."""
        ledger = self._live.ledger
        peak = ledger.peak(is_on_device)
        by_module: Counter[str] = Counter()
        for tensor in self._saved:
            by_module[tensor.module] += tensor.bytes
        return MeasuredMemory(
            saved_bytes=sum(tensor.bytes for tensor in self._saved),
            peak_bytes=peak.nbytes,
            activation_peak_bytes=ledger.peak(is_activation).nbytes,
            peak_phase=peak.phase,
            peak_module=peak.module,
            peak_parts=self._parts_at_peak(),
            parameter_bytes=self._parameter_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=_storage_bytes(optimizer_state_of(self._trainee.optimizer)),
            host_peak_bytes=ledger.peak(is_on_host).nbytes,
            largest_saved=tuple(self._saved[:LARGEST_SAVED]),
            saved_by_module=dict(by_module),
            timeline=_timeline(ledger),
        )

    def _parts_at_peak(self) -> dict[str, int]:
        """Return what lies on the device at the moment of the peak; the parts sum to it."""
        ledger = self._live.ledger
        owners = {number: part for part, numbers in self._numbers.items() for number in numbers}
        parts: Counter[str] = Counter()
        for number, nbytes in ledger.at_peak(is_on_device).items():
            parts[owners.get(number) or _part_of(ledger.lives[number])] += nbytes
        return {part: parts[part] for part in PEAK_PARTS if parts[part]}

    def live_totals(self, device: str) -> LiveTotals:
        """Return what the allocator of `device` should have seen."""
        ledger = self._live.ledger
        # on CPU the allocator hands out host copies too
        seen = is_on_device if device == "cuda" else is_storage
        return LiveTotals(
            standing_bytes=ledger.start_bytes(seen),
            stale_bytes=self._stale_bytes,
            peak_bytes=ledger.peak(seen).nbytes,
        )


def _part_of(life: Life) -> str:
    """Return the part of a storage that neither stood as something known nor was saved."""
    if life.kind is Kind.GRADIENT:
        return "gradients"
    if life.kind is Kind.OUTPUT:
        return "outputs"
    if life.kind is Kind.CREATED:
        return "temporary"
    # FSDP fills storages that stood empty and without a tensor
    is_unsharded = life.kind is Kind.PARAMETER or not life.dtype
    return "unsharded_parameters" if is_unsharded else "communication"


def mark_forward(live: LiveStorages, model: nn.Module, outputs: Any) -> None:
    """Tell returned tensors and unsharded parameters from what was saved."""
    live.ledger.mark(live.numbers(plain_tensors(tensors_held_by(outputs))), Kind.OUTPUT)
    live.ledger.mark(live.numbers(parameters_of(model)), Kind.PARAMETER)


def mark_backward(live: LiveStorages, model: nn.Module) -> None:
    """Tell the gradients of parameters from activations."""
    live.ledger.mark(live.numbers(gradients_of(model)), Kind.GRADIENT)


def _saved_tensors(ledger: Ledger) -> list[SavedTensor]:
    """Return what forward has left, largest first."""
    lives = sorted(filter(is_saved, ledger.lives), key=lambda life: -life.nbytes)
    return [
        SavedTensor(bytes=life.nbytes, op=life.op, module=life.module, shape=life.shape, dtype=life.dtype)
        for life in lives
    ]


def _timeline(ledger: Ledger) -> tuple[Moment, ...]:
    """Return the step in order of time; where there are too many stays, the highest of neighbours."""
    stays = ledger.timeline(is_on_device)
    width = math.ceil(len(stays) / MOST_MOMENTS) or 1
    groups = (stays[start : start + width] for start in range(0, len(stays), width))
    highest = (max(group, key=lambda stay: stay.nbytes) for group in groups)
    return tuple(Moment(bytes=stay.nbytes, phase=stay.phase, module=stay.module) for stay in highest)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of plain `tensors`."""
    sizes = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def _standing_by_part(trainee: Trainee, batch: Any) -> dict[str, Iterable[Tensor]]:
    model = trainee.model
    return {
        "parameters": parameters_of(model),
        "buffers": plain_tensors(model.buffers()),
        "gradients": gradients_of(model),
        "optimizer": optimizer_state_of(trainee.optimizer),
        "inputs": plain_tensors(tensors_held_by(batch)),
    }

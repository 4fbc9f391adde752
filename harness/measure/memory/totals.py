"""The memory of a training step by the definitions of the record, taken while the step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn

from harness.measure.memory.allocator import LiveTotals
from harness.measure.memory.storage_history import Birth, StorageChange, StorageHistory, in_order
from harness.measure.trainee import Trainee
from harness.records.measured import SavedTensor
from strategies.estimate.liveness import storage_bytes
from strategies.estimate.tensors import (
    gradients_of,
    optimizer_state_of,
    parameters_of,
    plain_tensors,
    tensors_held_by,
)
from strategies.step.ledger import (
    Kind,
    Ledger,
    Life,
    SizeChange,
    is_activation,
    is_on_device,
    is_on_host,
    is_saved,
    is_storage,
)
from strategies.step.live_storages import LiveStorages


def standing(trainee: Trainee, batch: Any, *, has_gradients: bool = False) -> tuple[Tensor, ...]:
    """Return the plain tensors that stand before a step.

    Args:
        trainee, batch: model and data of the step.
        has_gradients: the gradients of micro-batches before are among them; those of a step before never are.
    """
    parts = _standing_by_part(trainee, batch)
    return tuple(chain.from_iterable(parts[part] for part in parts if has_gradients or part != "gradients"))


class StepTotals:
    """Totals of one step of `trainee`; call each method at its moment of the step.

    Attributes:
        microbatch_bytes: the most activations that one forward of a micro-batch has left.
        actions: those of a schedule, of which each ends with one forward or backward.

    Args:
        live: the meter, which has been entered.
    """

    def __init__(self, trainee: Trainee, live: LiveStorages) -> None:
        self._trainee = trainee
        self._live = live
        self._parameter_bytes = 0
        self._stale_bytes = 0
        self._gradient_bytes = 0
        self._ends: list[int] = []
        self._saved: list[SavedTensor] = []
        self._numbers: dict[str, set[int]] = {}
        self._before_bytes = 0
        self.microbatch_bytes = 0
        self.actions: list[str] = []

    def start(self, batch: Any) -> None:
        """Enter what stands before the step."""
        model = self._trainee.model
        self._parameter_bytes = storage_bytes(parameters_of(model))
        self._stale_bytes = storage_bytes(gradients_of(model))
        parts = _standing_by_part(self._trainee, batch)
        self._numbers = {part: self._live.add_standing(tensors) for part, tensors in parts.items()}

    def on_dropped(self) -> None:
        """Note that the gradients of the step before have been dropped."""
        self._ends.append(len(self._live.ledger.changes))

    def before_forward(self) -> None:
        """Note what lives; call it when the forward of a micro-batch begins."""
        self._before_bytes = self._live.ledger.total(is_activation)

    def on_forward(self, returned: tuple[Any, Tensor | None]) -> None:
        """Take what a forward has left, if no other has left more; call it when forward has returned."""
        mark_forward(self._live, self._trainee.model, returned)
        left_bytes = self._live.ledger.total(is_activation) - self._before_bytes
        self.microbatch_bytes = max(self.microbatch_bytes, left_bytes)
        self._ends.append(len(self._live.ledger.changes))
        self._saved = max(self._saved, _saved_tensors(self._live.ledger), key=_total_bytes)
        lives = enumerate(self._live.ledger.lives)
        self._numbers.setdefault("saved", set()).update(number for number, life in lives if is_saved(life))

    def on_backward(self) -> None:
        """Take the gradients; call it when a backward has returned."""
        self._ends.append(len(self._live.ledger.changes))
        mark_backward(self._live, self._trainee.model)
        self._gradient_bytes = storage_bytes(gradients_of(self._trainee.model))

    def history(self) -> StorageHistory:
        """Return all storages of the step, at its end."""
        ledger = self._live.ledger
        parts = self.parts()
        start = Counter(dict.fromkeys(parts, 0))
        for life, part in zip(ledger.lives, parts, strict=True):
            start[part] += life.nbytes if is_on_device(life) else 0
        for change in ledger.changes:
            start[parts[change.life]] -= change.delta if is_on_device(ledger.lives[change.life]) else 0
        ends = [0, *self._ends, len(ledger.changes)]
        return StorageHistory(
            start=dict(+start),
            start_host_bytes=ledger.start_bytes(is_on_host),
            stretches=[
                in_order(
                    (change.life, _change(change, ledger.lives[change.life], parts[change.life]))
                    for change in ledger.changes[first:last]
                    if is_storage(ledger.lives[change.life])
                )
                for first, last in pairwise(ends)
            ],
            saved=self._saved,
            parameter_bytes=self._parameter_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=storage_bytes(optimizer_state_of(self._trainee.optimizer)),
        )

    def parts(self) -> list[str]:
        """Return the part of each storage, by number; call it at the end of the step."""
        owners = {number: part for part, numbers in self._numbers.items() for number in numbers}
        return [owners.get(number) or _part_of(life) for number, life in enumerate(self._live.ledger.lives)]

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
    """Return what forward has left, in order of birth."""
    return [
        SavedTensor(bytes=life.nbytes, op=life.op, module=life.module, shape=life.shape, dtype=life.dtype)
        for life in filter(is_saved, ledger.lives)
    ]


def _total_bytes(saved: list[SavedTensor]) -> int:
    return sum(tensor.bytes for tensor in saved)


def _change(change: SizeChange, life: Life, part: str) -> StorageChange:
    birth = Birth(life.op, life.module, life.source, life.shape, life.dtype) if life.op else Birth()
    return StorageChange(
        change.delta, change.phase, change.module, part, is_activation(life), life.on_host, birth
    )


def _standing_by_part(trainee: Trainee, batch: Any) -> dict[str, Iterable[Tensor]]:
    model = trainee.model
    return {
        "parameters": parameters_of(model),
        "buffers": plain_tensors(model.buffers()),
        "gradients": gradients_of(model),
        "optimizer": optimizer_state_of(trainee.optimizer),
        "inputs": plain_tensors(tensors_held_by(batch)),
    }

"""Rehearsals: a pass of a model on tensors without memory, which measures the bytes that it will hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from strategies.base import LossInputs, PlannedStep, StrategyError
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.loops.backward import SavedFate
from strategies.chunk.running.batch_loop import BatchLoop, BatchProof, part_of
from strategies.chunk.running.chunked_forward import (
    ChunkProgram,
    Loss,
    Scheduler,
    install,
    scopes_of,
    with_loss,
)
from strategies.regions.offloading import Offloading
from strategies.regions.recomputation import Recomputation
from strategies.regions.region import Around, Region, regions
from strategies.regions.rewind import python_state_kept
from strategies.step.ledger import Kind, is_activation
from strategies.step.live_storages import LiveStorages
from strategies.step.position import Position
from strategies.tracing.following import as_with_data
from strategies.tracing.guard import Programs
from strategies.tracing.operator_graph import record
from strategies.tracing.scope_graph import ScopeGraph
from strategies.tracing.shadow import Shadow, cast_inputs, compute_in, device_of, shadowed
from strategies.tracing.without_data import line_of, words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """One pass of a model on tensors without memory.

    Fields:
        model: plain model on the meta device.
        sample: positional inputs.
        device: device that the tensors pretend to be on.
        step: everything else in the training step.
        opaque: FQNs of the modules that run as they are, with the reason, once forward is recorded.
        joins_loss: whether the model goes on to the loss of the step.
    """

    model: nn.Module
    sample: tuple[Any, ...]
    device: torch.device
    step: PlannedStep
    training: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    joins_loss: bool = False
    _recorded: dict[type[nn.Module], Programs[ChunkProgram]] = field(default_factory=dict)
    _proofs: Programs[BatchProof] = field(default_factory=Programs)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample: tuple[Any, ...],
        step: PlannedStep,
        *,
        training: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Rehearsal:
        """Return the rehearsal of a plain `model`, with or without memory, on the device of the step."""
        shadow = Shadow.of(model).model
        if step.computes_in is not None:
            units = [shadow.get_submodule(fqn) for fqn in step.units]
            compute_in(step.computes_in, shadow, [shadow, *units])
        return cls(
            model=shadow,
            sample=sample,
            device=step.device or device_of(tree_flatten((sample, kwargs))[0]),
            step=step,
            training=training,
            kwargs=kwargs or {},
        )

    def recorded(self, where: str) -> list[ScopeGraph]:
        """Return the graphs of the scopes, as the step will run them; the model's comes last.

        Raises:
            StrategyError: forward cannot be recorded; it names `where`.
        """

        def cast() -> tuple[Shadow, tuple[Any, ...], Mapping[str, Any]]:
            shadow, inputs, named, targets = self.cast()
            inputs, named = cast_inputs((inputs, named), self.step.computes_in)
            return shadow, self._of_a_call(inputs, targets), named

        forward = None if self.loss is None else partial(with_loss, loss=self.loss)
        with self._kept(), torch.set_grad_enabled(self.training), self.step.autocast():
            found = record(cast, scopes_of(self.model), self.opaque, where=where, forward=forward)
        self.opaque.update(found.opaque)
        return found.graphs

    def _kept(self) -> AbstractContextManager[None]:
        """Leave what the model and its shadows both hold as it is, generators of random numbers among it."""
        return python_state_kept(self.model, (), remedy="")

    @property
    def loss(self) -> Loss | None:
        """The loss that the model goes on to; `None` where it lies outside of the model."""
        return self.step.loss if self.joins_loss else None

    def _of_a_call(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*inputs, LossInputs(targets)) if self.joins_loss else inputs

    def cast(self) -> tuple[Shadow, tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]]:
        """Return the shadow of the model, its inputs, and what the loss takes besides its results."""
        shadow = Shadow.of(self.model).on(self.device)
        given = self.sample, dict(self.kwargs), self.step.loss_inputs
        return shadow, *shadowed(shadow, given, self.device)

    def around(self) -> dict[str, SavedFate]:
        """Return where AC leaves saved tensors of modules, by FQN, unless they stay on the device."""
        shadow, inputs, *_ = self.cast()
        if self.step.enclose is None:
            return {}
        self.step.enclose(shadow.model, inputs)
        around = regions(shadow.model)
        scopes = scopes_of(self.model)
        for fqn in around:
            if fqn and fqn not in scopes:
                raise StrategyError(
                    "ac",
                    f"the region around {fqn!r} would never run, because chunk replaces the forward of its "
                    "block; put regions around whole blocks, or use chunk=none",
                )
        found = {fqn: _saved_by(region) for fqn, region in around.items()}
        return {fqn: saved for fqn, saved in found.items() if saved is not SavedFate.KEPT}

    def of_part(self, flow: BatchFlow, length: int) -> Rehearsal:
        """Return the rehearsal of the first `length` samples of the batch."""
        sample, kwargs = part_of(flow, (self.sample, dict(self.kwargs)), 0, length)
        return replace(self, sample=sample, kwargs=kwargs, opaque=dict(self.opaque))

    def peak_bytes(self, schedulers: Mapping[str, Scheduler], batch: int | None = None) -> int:
        """Return the highest total of the storages that the pass makes, gradients of parameters left out.

        Args:
            schedulers: what decides for each scope, by FQN.
            batch: samples of a chunk of the loop over the batch; `None`: there is no such loop.
        """
        shadow, inputs, named, targets = self.cast()
        assert shadow.mode is not None
        standing = [*shadow.model.parameters(), *shadow.model.buffers()]
        standing += [leaf for leaf in tree_flatten((inputs, named, targets))[0] if isinstance(leaf, Tensor)]
        loop = None if batch is None else BatchLoop(length=batch, alike=self._proofs)
        install(shadow.model, schedulers, self.opaque, self._recorded, loss=self.loss, batch=loop)
        call = shadow.model if self.step.enclose is None else self.step.enclose(shadow.model, inputs)
        live = LiveStorages(Position(), device=self.device.type)
        with (
            _followed(),
            self._kept(),
            torch.set_grad_enabled(self.training),
            shadow.mode,
            live,
            as_with_data(),
        ):
            live.add_standing(standing)
            if self.training:
                self._train_once(partial(call, *self._of_a_call(inputs, targets), **named), targets)
                gradients = [
                    each.grad
                    for each in shadow.model.parameters()
                    if each.grad is not None
                    and each.grad.layout is torch.strided  # a sparse one has no storage
                ]
                live.ledger.mark(live.numbers(gradients), Kind.GRADIENT)
                return live.ledger.peak(is_activation).nbytes + self.step.reserved_bytes
            with self.step.autocast():
                call(*inputs, **named)
            return live.ledger.peak(is_activation).nbytes

    def _train_once(self, call: Callable[[], Any], targets: tuple[Any, ...]) -> None:
        """Run forward and backward of what is called for the model."""
        loss = self.step.loss
        with self.step.autocast():
            outputs = call()
            if loss is not None and not self.joins_loss:
                outputs = loss(outputs, *targets)
        if loss is not None:
            outputs.backward()  # type: ignore[no-untyped-call]
            return
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        del outputs
        gradients = [result.detach().new_ones(()).expand(result.shape) for result in results]
        torch.autograd.backward(results, gradients)


@contextmanager
def _followed() -> Iterator[None]:
    """Say in a sentence what a pass raises without data, such as a hook that asks for the size of a gradient.

    Raises:
        StrategyError: torch has refused to go on.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        said = words_of(error)
        problem = (
            f"a pass of the model cannot be followed without data{line_of(error)}, where it raises {said}"
        )
        raise StrategyError("chunk", f"{problem}; use chunk=none") from error


def _saved_by(region: Region) -> SavedFate:
    inner = region.inner if isinstance(region, Around) else region
    if isinstance(inner, Recomputation) and inner.save_list is None:
        return SavedFate.RECOMPUTED
    return SavedFate.OFFLOADED if isinstance(inner, Offloading) and inner.kind == "all" else SavedFate.KEPT

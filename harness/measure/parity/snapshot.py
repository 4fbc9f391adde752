"""Everything that one training step computes, kept as private copies to be compared."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree  # torch.utils has no public name for it

from harness.errors import ConfigError
from harness.measure.parity.backward_order import backward_order
from harness.measure.parity.module_state import HeldState, StateChanges, module_state
from harness.measure.rng import rng_states, seeded
from harness.measure.trainee import Trainee, Watcher
from harness.models.base import Batch
from harness.records.parity_result import PARTS
from strategies.estimate.tensors import dtype_name, held_by, holds_numbers, tensors_held_by

_WALKED = (Mapping, list, tuple, deque, MappingView, np.ndarray)
"""What holds others and has no equality of its own that would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A detached copy of a tensor; of a DTensor the local shard, or the whole.

    Fields:
        value: dense copy; on the tensor's device, or on the host.
        kind: class, and what class and shape of the copy no longer tell: placements, sparsity.
    """

    value: Tensor
    kind: str
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor, *, whole: bool = False) -> Captured:
        """Copy `tensor`; later steps may overwrite the original.

        Args:
            whole: gather a DTensor, so that its placements do not matter; all ranks of its mesh do.
        """
        if whole and isinstance(tensor, DTensor):
            # what FSDP keeps in host memory is gathered where ranks can meet
            reachable: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
            tensor = reachable.full_tensor()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = _dense(local.detach())
        copy = copy.resolve_conj().resolve_neg()
        return cls(value=copy, kind=_kind(tensor), device_type=local.device.type)

    def to_host(self) -> Captured:
        """Return the same with the copy on the host."""
        return dataclasses.replace(self, value=self.value.cpu())

    def of_part(self, part: int, parts: int, dim: int = 1) -> Captured:
        """Return the same with one of equal parts of a dimension."""
        return dataclasses.replace(self, value=self.value.chunk(parts, dim)[part])

    def like(self, own: Any, part: int, parts: int) -> Captured:
        """Return the same, with its part of dimension 0 where `own` is as large as that."""
        if not isinstance(own, Captured) or parts == 1:
            return self
        whole, shape = self.value.shape, own.value.shape
        is_part = whole and shape and whole[0] == parts * shape[0] and whole[1:] == shape[1:]
        return self.of_part(part, parts, dim=0) if is_part else self

    def __str__(self) -> str:
        return f"{self.kind} {dtype_name(self.value.dtype)} {tuple(self.value.shape)} on {self.device_type}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """A container of outputs: its class, and the names of what it holds, in order."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.names)}"


Leaves = Mapping[str, Any]
"""Name to `Captured`, `Structure`, or a plain value (None for an absent gradient)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One training step of one model on one rank.

    Fields:
        outputs: what the module returned, flattened: `outputs['logits']`, `outputs[0].scale`; `None` where
            they are never whole. With several micro-batches: `microbatch[0].outputs['logits']`.
        loss: the scalar loss, as `loss` or `microbatch[0].loss`; empty on a rank without the last stage of a
            pipeline.
        gradients: gradients by parameter name, after backward; None where there is none.
        input_gradients: gradients of the inputs that require them, by path.
        buffers: all buffers by name, after backward, also those outside the state dict.
        state: what modules hold outside of parameters and buffers, after backward.
        rng_state: state by generator, after backward.
        parameters: parameters by name, after the optimizer step.
        changed_state: names in `state`, or gone from it, that changed since before the first step.
        uncompared: paths of what modules hold and nothing can be read of, each with its type.
        backward_order: names of the gradients in the order in which backward makes them.
        blocks: names of the trained parameters of each block, by the block's FQN, in the model's order.
        checkpointed: names of the trained parameters of what checkpointing recomputes.
    """

    outputs: Leaves | None
    loss: Leaves
    gradients: Leaves
    input_gradients: Leaves
    buffers: Leaves
    state: Leaves
    rng_state: Leaves
    parameters: Leaves
    changed_state: frozenset[str] = frozenset()
    uncompared: tuple[str, ...] = ()
    backward_order: tuple[str, ...] = ()
    blocks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    checkpointed: frozenset[str] = frozenset()

    def within(self, own: Snapshot, share: int = 0, shares: int = 1) -> Snapshot:
        """Return what of this step a rank has, a stage or some of the experts.

        Args:
            share, shares: which of equal shares of the experts the rank has, where one tensor holds all.
        """
        parts: dict[str, Any] = {
            part: {
                name: leaf.like(owned[name], share, shares) if isinstance(leaf, Captured) else leaf
                for name, leaf in leaves.items()
                if name in owned
            }
            for part in PARTS
            if (leaves := getattr(self, part)) is not None
            for owned in [getattr(own, part) or {}]
        }
        return dataclasses.replace(self, **{**parts, "outputs": own.outputs and parts["outputs"]})

    def to_host(self) -> Snapshot:
        """Return the same with all copies on the host, where the device cannot hold two models."""
        parts = {part: getattr(self, part) for part in PARTS}
        moved: dict[str, Any] = {part: leaves and _to_host(leaves) for part, leaves in parts.items()}
        return dataclasses.replace(self, **moved)

    def of_part(self, part: int, parts: int) -> Snapshot:
        """Return the same with one of equal parts of each output's dimension 1, that of the sequence."""
        cut = {
            name: leaf.of_part(part, parts) if isinstance(leaf, Captured) else leaf
            for name, leaf in (self.outputs or {}).items()
        }
        return dataclasses.replace(self, outputs=self.outputs and cut)


def steps(
    trainee: Trainee, batches: Iterable[Batch], *, seed: int, dp_rank: int = 0, whole: bool = False
) -> Iterator[Snapshot]:
    """Train one optimizer step a batch and yield what each computed.

    Every step sets the generators from (seed, step, dp_rank) and leaves them as they were, so that the steps
    of variant and twin may alternate or follow one another and still draw the same numbers.

    Args:
        trainee: the model and its optimizer; both move on.
        batches: one a step, on the device that computes.
        dp_rank: index of the rank's batch among all data-parallel ones.
        whole: take gradients and parameters as wholes, for models that place them differently.
    """
    changes = StateChanges(trainee.model)
    for step, batch in enumerate(batches):
        device = device_of_batch(batch)
        with seeded(seed, step=step, dp_rank=dp_rank, device=device):
            snapshot = _train_one_step(trainee, batch, device, changes, whole=whole)
        yield snapshot
        del snapshot  # the consumer decides how long it lives, not this suspended frame


def flatten(value: Any, name: str, *, whole: bool = False) -> dict[str, Any]:
    """Return tensors, plain values and containers within `value` by their path, which starts with `name`.

    With `whole`, DTensors are gathered.

    Walked are mappings, sequences, dataclasses, objects that define no equality of their own, and those that
    hold tensors or arrays.

    Raises:
        ConfigError: something cannot be compared; the message says what.
    """
    return {path: _copied(leaf, whole=whole) for path, leaf in _walk(value, name, ancestors=frozenset())}


def require_comparable(outputs: Any) -> None:
    """Refuse outputs that no comparison could read, without a copy of them.

    Raises:
        ConfigError: as of `flatten`.
    """
    for _ in _walk(outputs, "outputs", ancestors=frozenset()):
        pass


def has_identity_only(value: Any) -> bool:
    """Say whether the class of `value` defines no equality: two such objects always differ."""
    return getattr(type(value), "__eq__", None) is object.__eq__


def _train_one_step(
    trainee: Trainee, batch: Batch, device: torch.device, changes: StateChanges, *, whole: bool
) -> Snapshot:
    # of two that are compared as wholes, one may have a wrapper that the other does without
    wrapper = trainee.model
    model = wrapper.module if whole and isinstance(wrapper, DistributedDataParallel) else wrapper
    trainee.zero_grad()
    inputs = _differentiated(batch)
    returned = _Returned(model, whole=whole)
    trainee.step(batch, returned)
    gradients = {name: _gradient(parameter, whole=whole) for name, parameter in model.named_parameters()}
    input_gradients = {name: _gradient(tensor) for name, tensor in inputs.items()}
    _forget_gradients(inputs)
    # duplicates kept: a module shared by two paths must stay shared
    buffers = {name: Captured.of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    # a sharded model holds other numbers than the whole one, such as its local heads
    held = HeldState() if whole else module_state(model)
    changed_state = frozenset() if whole else changes.names(held.values)
    state = {name: _copied(value) for name, value in held.values.items()}
    rng_state = {name: Captured.of(state) for name, state in rng_states(device).items()}
    trainee.update()
    return Snapshot(
        outputs=returned.outputs,
        loss=_numbered(returned.losses),
        gradients=gradients,
        input_gradients=input_gradients,
        buffers=buffers,
        state=state,
        rng_state=rng_state,
        parameters={
            name: Captured.of(parameter, whole=whole) for name, parameter in model.named_parameters()
        },
        changed_state=changed_state,
        uncompared=held.uncompared,
        backward_order=returned.backward_order,
        blocks=_trained_names(model, trainee.blocks),
        checkpointed=frozenset().union(*_trained_names(model, trainee.checkpointed).values()),
    )


class _Returned(Watcher):
    """Copies of what each forward of a step has returned, as they come."""

    def __init__(self, model: nn.Module, *, whole: bool) -> None:
        self._model = model
        self._whole = whole
        self._outputs: list[Leaves | None] = []
        self.losses: list[Leaves] = []
        self.backward_order: tuple[str, ...] = ()

    def on_forward(self, outputs: Any, loss: Tensor | None) -> None:
        if not self.backward_order:
            last = outputs if loss is None else loss
            self.backward_order = backward_order(last, dict(self._model.named_parameters()))
        if loss is None:
            return
        self._outputs.append(None if outputs is None else flatten(outputs, "outputs", whole=self._whole))
        self.losses.append(flatten(loss, "loss"))

    @property
    def outputs(self) -> Leaves | None:
        """The outputs of all micro-batches; `None` where they are never whole."""
        whole = [each for each in self._outputs if each is not None]
        return _numbered(whole) if whole else None


def _numbered(leaves: Sequence[Leaves]) -> Leaves:
    """Return leaves by their paths, each with the number of its micro-batch where there are several."""
    if len(leaves) == 1:
        return leaves[0]
    return {
        f"microbatch[{number}].{path}": leaf
        for number, part in enumerate(leaves)
        for path, leaf in part.items()
    }


def _differentiated(batch: Batch) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves_with_path((batch.inputs, dict(batch.keywords)))
    inputs = {
        f"inputs{pytree.keystr(path[1:])}": leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf
    }
    _forget_gradients(inputs)
    return inputs


def _forget_gradients(inputs: Mapping[str, Tensor]) -> None:
    for tensor in inputs.values():
        tensor.grad = None


def _gradient(tensor: Tensor, *, whole: bool = False) -> Captured | None:
    return None if tensor.grad is None else Captured.of(tensor.grad, whole=whole)


def _trained_names(model: nn.Module, parts: Mapping[str, nn.Module]) -> dict[str, frozenset[str]]:
    """Return the names of the trained parameters of each part of `model`."""
    names = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    return {
        fqn: frozenset(names[id(each)] for each in part.parameters() if id(each) in names)
        for fqn, part in parts.items()
    }


def device_of_batch(batch: Batch) -> torch.device:
    """Return the device of what a step reads."""
    # not the parameters' device: FSDP may keep those on the host
    return next((tensor.device for tensor in tensors_held_by(batch)), torch.device("cpu"))


def _dense(tensor: Tensor) -> Tensor:
    """Return a strided copy; of a nested tensor all elements in a row."""
    if tensor.is_nested:
        return torch.cat([row.reshape(-1) for row in tensor.unbind()])
    copy = tensor.clone()
    return copy if copy.layout is torch.strided else copy.to_dense()


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"DTensor {tensor.placements} of {tuple(tensor.shape)}"
    if tensor.is_nested:
        return f"Tensor (nested) of {[tuple(row.shape) for row in tensor.unbind()]}"
    return "Tensor" if tensor.layout is torch.strided else f"Tensor ({tensor.layout})"


def _to_host(leaves: Leaves) -> dict[str, Any]:
    return {name: leaf.to_host() if isinstance(leaf, Captured) else leaf for name, leaf in leaves.items()}


def _copied(leaf: Any, *, whole: bool = False) -> Any:
    if isinstance(leaf, Tensor):
        return Captured.of(leaf, whole=whole)
    return _array(leaf) if _is_array_of_numbers(leaf) else leaf


def _is_array_of_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _walk(value: Any, name: str, *, ancestors: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value by name, and the structure of each container."""
    is_leaf = isinstance(value, Tensor) or _is_array_of_numbers(value) or id(value) in ancestors
    held = None if is_leaf else _held(value, name)
    if held is None:
        yield name, value
        return
    yield name, Structure(kind=type(value).__qualname__, names=tuple(name + path for path in held))
    for path, item in held.items():
        yield from _walk(item, name + path, ancestors=ancestors | {id(value)})


def _held(value: Any, name: str) -> dict[str, Any] | None:
    """Return what `value` holds by the path from it; `None` of what is compared as a whole.

    Raises:
        ConfigError: it cannot be compared: it can be read once only, or has no order.
    """
    held = held_by(value)
    if isinstance(value, Iterator) or (held is None and _is_closed(value)):
        raise _refusal(value, name, "which cannot be read twice")
    if held is None or isinstance(value, _WALKED) or dataclasses.is_dataclass(value):
        return held
    if isinstance(value, AbstractSet):
        if holds_numbers(value):
            raise _refusal(value, name, "which has no order to compare its tensors in")
        return None
    return held if has_identity_only(value) or holds_numbers(value) else None


def _is_closed(value: Any) -> bool:
    """Return whether something may be inside that nobody can compare."""
    return has_identity_only(value) and hasattr(value, "__iter__") and not callable(value)


def _refusal(value: Any, name: str, why: str) -> ConfigError:
    problem = f"{name} is a {type(value).__qualname__}, {why}; return a list, a tuple or a dictionary"
    return ConfigError("model", problem)


def _array(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of an array of numbers as a tensor; of other ones a plain value."""
    try:
        native = np.array(array, dtype=array.dtype.newbyteorder("="))
        copy = torch.from_numpy(native)
    except TypeError:  # text, dates, numbers that torch does not have
        return array.dtype.str, array.shape, repr(array.tolist())
    return Captured(value=copy, kind=f"ndarray {array.dtype.str}", device_type="cpu")

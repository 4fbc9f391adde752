"""Liveness: which storages are alive while a list of steps runs, and the peak that follows.

A step allocates storages. A storage is freed after the last step that holds a tensor on it. The code of a
`torch.fx` graph does the same: it drops each variable after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from strategies.estimate.in_place_reuse import Overwrite, overwrites
from strategies.estimate.operator_cost import tensors_of

Key: TypeAlias = Hashable
"""Identifies a storage."""

_REDUCED_IN_PLACE = frozenset(
    {
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.binary_cross_entropy.default,
    }
)
NUMBER_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
"""Bytes of the tensor that torch makes of a Python number given for a tensor."""


class StorageStep(NamedTuple):
    """The effect of one step on storages.

    Fields:
        makes: bytes of each storage that the step allocates.
        holds: storages that must live until the step has ended.
        private_bytes: bytes that the step allocates and frees again, on top of these storages.
    """

    makes: Mapping[Key, int]
    holds: frozenset[Key]
    private_bytes: int = 0


IDLE = StorageStep(makes={}, holds=frozenset())
"""The step of a view. The users of the view hold the storage for longer than the view does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The bytes alive during each step.

    Fields:
        live_bytes: highest total of bytes during each step.
        before_bytes: bytes alive when each step begins.
        last: position of the step after which each storage is freed; the number of steps for kept storages.
    """

    live_bytes: Sequence[int]
    before_bytes: Sequence[int]
    last: Mapping[Key, int]

    @property
    def peak_bytes(self) -> int:
        """The highest total."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """The first step that reaches the highest total."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0


def simulate(steps: Sequence[StorageStep], kept: Iterable[Key]) -> Profile:
    """Return what is alive while `steps` run in order.

    Args:
        kept: storages that outlive the last step.
    """
    last: dict[Key, int] = {}
    sizes: dict[Key, int] = {}
    made = [0] * len(steps)
    for index, step in enumerate(steps):
        if step is IDLE:
            continue
        if step.makes:
            sizes |= step.makes
            last |= dict.fromkeys(step.makes, index)
            made[index] = sum(step.makes.values())
        last |= dict.fromkeys(step.holds, index)
    last |= dict.fromkeys(kept, len(steps))
    lost = [0] * (len(steps) + 1)
    for key in sizes:
        lost[last[key]] += sizes[key]
    alive = list(accumulate(map(sub, made, (0, *lost))))
    return Profile(
        live_bytes=[live + step.private_bytes for live, step in zip(alive, steps, strict=True)],
        before_bytes=list(map(sub, alive, made)),
        last={key: last[key] for key in sizes},
    )


@dataclass(kw_only=True, slots=True)
class Storages:
    """The storages of a graph's values.

    Fields:
        made: storages that each node allocates, with their bytes.
        standing: storages of inputs, parameters and results of inner scopes that no operator has allocated.
        overwrites: nodes that may overwrite an input.
        has_gradients: true where forward was recorded with gradients on.
    """

    keys: dict[fx.Node, tuple[Key, ...]] = field(default_factory=dict)
    made: dict[fx.Node, dict[Key, int]] = field(default_factory=dict)
    standing: dict[fx.Node, frozenset[Key]] = field(default_factory=dict)
    steps: dict[fx.Node, StorageStep] = field(default_factory=dict)
    overwrites: dict[fx.Node, Overwrite] = field(default_factory=dict)
    has_gradients: bool = False
    _sizes: dict[Key, int] = field(default_factory=dict)
    _readers: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    @classmethod
    def of_graph(cls, graph: fx.Graph) -> Storages:
        """Return the storages of `graph`, read from the fake results of its nodes; inputs count no bytes."""
        result = next(iter(reversed(graph.nodes)))
        storages, born = cls(has_gradients=result.meta["has_gradients"]), set[Key]()
        for node in graph.nodes:
            sizes = {
                key_of(tensor): tensor.untyped_storage().nbytes()
                + hidden_bytes(node.target, tensor, node.args)
                for tensor in tensors_of(node)
            }
            storages.keys[node] = tuple(sizes)
            if node.op in {"placeholder", "get_attr"}:
                storages.standing[node] = frozenset(sizes)
            elif "standing" in node.meta:
                storages.standing[node] = frozenset(node.meta["standing"])
            born |= storages.standing.get(node, frozenset())
            storages.made[node] = {key: size for key, size in sizes.items() if key not in born}
            born.update(sizes)
        if not storages.has_gradients:  # autograd may have saved what is overwritten
            storages.overwrites.update(overwrites(graph, storages.keys, storages.made))
        storages.steps.update((node, storages._step(node)) for node in graph.nodes)
        return storages

    def _step(self, node: fx.Node) -> StorageStep:
        """Return what one operator makes and holds; a view holds nothing of its own."""
        of_inputs = {key for source in node.all_input_nodes for key in self.keys[source]}
        private_bytes = numbers_bytes(node.target, node.args)
        is_view = node.op == "call_function" and not self.made[node] and of_inputs.issuperset(self.keys[node])
        if is_view and node.users and not private_bytes:
            return IDLE
        return StorageStep(
            makes=self.made[node],
            holds=frozenset(of_inputs.union(self.keys[node])),
            private_bytes=private_bytes,
        )

    def readers(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the nodes that take the value of `node`, or a view of it."""
        if node not in self._readers:
            found: set[fx.Node] = set(node.users)
            for user in node.users:
                if set(self.keys[node]) & set(self.keys[user]):
                    found |= self.readers(user)
            self._readers[node] = frozenset(found)
        return self._readers[node]

    def size(self, key: Key, otherwise: int) -> int:
        """Return the bytes of a storage that a node makes, or else of what lies on one from outside."""
        if not self._sizes:
            self._sizes.update(item for made in self.made.values() for item in made.items())
        return self._sizes.get(key, otherwise)


def key_of(tensor: Tensor) -> int:
    """Return the key of the storage of a plain tensor, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 (storages have no public identity)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of plain tensors."""
    sizes = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def hidden_bytes(operator: Any, result: Tensor, args: Sequence[Any]) -> int:
    """Return what the storage of a result has beyond that of its fake.

    Some losses are reduced in the memory of their elements, which then holds one number.
    """
    if operator not in _REDUCED_IN_PLACE or result.dim():
        return 0
    operands = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args[:2]]
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    return int(shape.numel() - 1) * result.element_size()


def gradient_of(key: Key) -> Key:
    """Return the key of the gradient of a storage."""
    return ~key if isinstance(key, int) else ("gradient", key)  # hashed often


def numbers_bytes(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the tensors that torch makes of the Python numbers given for tensors to `func`."""
    return sum(NUMBER_BYTES[type(value)] for _, value in promoted_numbers(func, args))


def promoted_numbers(func: Any, args: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return argument and value of the Python numbers given for tensors: torch makes a tensor of each."""
    numbers = [index for index, value in enumerate(args) if type(value) in NUMBER_BYTES]
    if not numbers:
        return []
    names = _tensor_arguments(func)
    return [(names[index], args[index]) for index in numbers if index in names]


@functools.cache
def _tensor_arguments(func: Any) -> dict[int, str]:
    """Return position and name of the arguments that the schema of `func` calls tensors."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    arguments = [] if schema is None else schema.arguments
    return {i: a.name for i, a in enumerate(arguments) if str(a.type) in {"Tensor", "Optional[Tensor]"}}

"""One forward of a plain model, followed: in what order it calls its blocks, and what they pass on.

A model can be cut between its blocks where each of them is called once, one after the other, and where one
tensor of what a block gives is what the next one takes. Weights show by who reads them to which side of a cut
they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from harness.models.base import Batch
from harness.trial.elsewhere import Elsewhere
from harness.trial.plain_model import PlainModel
from harness.trial.without_dropout import WithoutDropout
from strategies import StrategyError, generators
from strategies.regions.rewind import noted_state

_REMEDY = "use mesh.pp=1 without its options, or a model whose forward hands one tensor from block to block"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOn:
    """The output of a block, of which the next block takes one tensor.

    Fields:
        structure, leaves: the output; a tensor without its values.
        leaf: position of the tensor among the leaves.
        argument: its position among the leaves of what the next block takes.
    """

    structure: TreeSpec
    leaves: Sequence[Any]
    leaf: int
    argument: int

    @property
    def tensor(self) -> Elsewhere:
        """The tensor, without its values."""
        found: Elsewhere = self.leaves[self.leaf]
        return found

    def output(self, given: Tensor | None) -> Any:
        """Return the output with a tensor in its place; all others stay without values."""
        leaves = list(self.leaves)
        if given is not None:
            leaves[self.leaf] = given
        return tree_unflatten(leaves, self.structure)

    def taken(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the tensor among what the next block takes."""
        found: Tensor = tree_leaves((args, dict(kwargs)))[self.argument]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFlow:
    """The order of a model's blocks, and what goes from one to the next.

    Fields:
        blocks: their FQNs in the order of their calls.
        passed: what each block but the last passes on.
        readers: numbers of the blocks that read a parameter, by its FQN; what is read before the first one
            or after the last one counts as theirs.
        inputs, keywords: what the model takes, without values but those that all micro-batches have.
    """

    blocks: tuple[str, ...]
    passed: tuple[PassedOn, ...]
    readers: Mapping[str, frozenset[int]]
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(
        cls, plain: PlainModel, blocks: Mapping[str, nn.Module], sample: Batch, where: str
    ) -> tuple[BlockFlow, Any]:
        """Return the flow of a model in one forward that drops nothing out, and what it gives.

        Args:
            plain: the whole model, before tensors of it are sharded; its state stays.
            blocks: the modules between which it may be cut, by FQN.
            where: option that a refusal names.

        Raises:
            StrategyError: blocks are not called one after the other, each once, with one tensor.
        """
        follower = _Follower(plain.model, blocks)
        with forward_alone(plain), follower.listening(), follower:
            outputs = plain.model(*sample.inputs, **sample.keywords)
        try:
            order = follower.order()
            passed = tuple(_passed_on(follower, *pair) for pair in pairwise(order))
            _require_one_shape(passed)
        except _UncutError as error:
            name = type(plain.model).__name__
            problem = f"{name} cannot be cut between its blocks: {error}"
            raise StrategyError(where, f"{problem}; {_REMEDY}") from None
        hidden = partial(tree_map, partial(_hidden, "what the model takes"))
        same = sample.positions
        flow = cls(
            blocks=order,
            passed=passed,
            readers={name: frozenset(found) for name, found in follower.readers.items()},
            inputs=tuple(each if at in same else hidden(each) for at, each in enumerate(sample.inputs)),
            keywords={name: each if name in same else hidden(each) for name, each in sample.keywords.items()},
        )
        return flow, outputs

    def like_between(self) -> Tensor:
        """Return a tensor without values of what blocks pass on."""
        return self.passed[0].tensor


@contextmanager
def forward_alone(plain: PlainModel) -> Iterator[None]:
    """Let forwards run that change nothing of a model, drop nothing out and leave no graph."""
    put_back = noted_state(plain.model)
    try:
        with generators.restored(), torch.no_grad(), plain.precision.autocast(), WithoutDropout():
            yield
    finally:
        put_back()


class _UncutError(Exception):
    """Why a model cannot be cut."""


@dataclass(kw_only=True, slots=True)
class _Call:
    taken: Sequence[Any]
    given: Any = None


class _Follower(TorchDispatchMode):
    """Notes the calls of blocks, and which of them read parameters."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._blocks = blocks
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(_storage(parameter), []).append(name)
        self.calls: list[tuple[str, _Call]] = []
        self.readers: dict[str, set[int]] = {name: set() for each in self._names.values() for name in each}
        self._number = 0

    def order(self) -> tuple[str, ...]:
        """Return the blocks in the order of their calls."""
        called = [name for name, _ in self.calls]
        repeated = next((name for name in called if called.count(name) > 1), None)
        if repeated is not None:
            raise _UncutError(f"its forward calls {repeated!r} {called.count(repeated)} times")
        missing = next((name for name in self._blocks if name not in called), None)
        if missing is not None:
            raise _UncutError(f"its forward does not call {missing!r}")
        return tuple(called)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note calls inside the scope."""
        handles = []
        for name, block in self._blocks.items():
            handles += [
                block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                block.register_forward_hook(self._leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((name, _Call(taken=tree_leaves((args, kwargs)))))

    def _leave(self, _block: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.calls[-1][1].given = output
        # what runs between two blocks runs in the stage of the second one
        self._number = min(self._number + 1, len(self._blocks) - 1)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Note which parameters an operator reads."""
        for leaf in tree_leaves((args, dict(kwargs))):
            if isinstance(leaf, Tensor):
                for name in self._names.get(_storage(leaf), ()):
                    self.readers[name].add(self._number)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (a storage has no public identity)
    return identity


def _passed_on(follower: _Follower, first: str, second: str) -> PassedOn:
    """Return what one block passes on to the next."""
    calls = dict(follower.calls)
    leaves, structure = tree_flatten(calls[first].given)
    taken = calls[second].taken
    found = [
        (leaf, argument)
        for leaf, given in enumerate(leaves)
        for argument, each in enumerate(taken)
        if isinstance(given, Tensor) and each is given
    ]
    if len({leaf for leaf, _ in found}) != 1:
        what = f"{len(found)} tensors" if found else "no tensor"
        raise _UncutError(f"{second!r} takes {what} as {first!r} gives them")
    hidden = [_hidden(repr(first), leaf) for leaf in leaves]
    return PassedOn(structure=structure, leaves=hidden, leaf=found[0][0], argument=found[0][1])


def _require_one_shape(passed: Sequence[PassedOn]) -> None:
    """Refuse blocks that pass on tensors of several shapes: ranks receive all in one."""
    shapes = {(tuple(each.tensor.shape), each.tensor.dtype) for each in passed}
    if len(shapes) > 1:
        raise _UncutError(f"they pass on tensors of {len(shapes)} shapes or dtypes")


def _hidden(origin: str, leaf: Any) -> Any:
    return Elsewhere.like(leaf, origin) if isinstance(leaf, Tensor) else leaf

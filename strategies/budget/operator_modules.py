"""Which submodule of a block calls which operator, by the numbers that plans give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from strategies.base import RunnableStep
from strategies.budget.block_tape import Address
from strategies.budget.memory_layout import dense_of
from strategies.budget.operator_facts import facts_of, fake_mode, is_numbered
from strategies.estimate.operator_mode import OperatorMode
from strategies.estimate.tensors import tensors_in


@dataclass(kw_only=True, slots=True, eq=False)
class BlockForward:
    """The operators of a block's first forward.

    Fields:
        operators: name of each operator, by number.
        modules: FQN inside the block of the innermost submodule that calls each; empty where it is the block.
        results: operator and result that make the storages of a submodule's results, by FQN inside the block;
            without those that the block has not made.
        written: operator and result that make the storages that a later operator writes to in place.
        draws: numbers of the operators that draw random numbers, and whether they draw them in place.
    """

    operators: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    results: dict[str, set[Address]] = field(default_factory=dict)
    written: set[Address] = field(default_factory=set)
    draws: dict[int, bool] = field(default_factory=dict)


def block_forwards(step: RunnableStep, blocks: Mapping[str, nn.Module]) -> dict[str, BlockForward]:
    """Return the forwards of `blocks`, by FQN, as they are in `step`."""
    with step.around():
        follower = _Follower()
        with follower.around(blocks), follower:
            step.run()
    return follower.forwards


class _Follower(OperatorMode):
    """Notes the operators of blocks, and who calls them.

    Attributes:
        forwards: what was noted, by FQN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forwards: dict[str, BlockForward] = {}
        self._fakes = fake_mode()
        self._inside: BlockForward | None = None
        self._stack: list[str] = []
        self._made: dict[int, tuple[Tensor, Address]] = {}

    @contextmanager
    def around(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow the calls of `blocks` and of what lies in them."""
        with ExitStack() as hooks:
            for fqn, block in blocks.items():
                for name, module in block.named_modules():
                    entered = partial(self._enter, fqn, name)
                    hooks.callback(module.register_forward_pre_hook(entered).remove)
                    hooks.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note it."""
        if self._inside is None or not is_numbered(func, self._fakes):
            return func(*args, **kwargs)
        number, facts = len(self._inside.operators), facts_of(func)
        self._inside.operators.append(facts.name)
        self._inside.modules.append(self._stack[-1])
        if facts.draws(args, kwargs):
            self._inside.draws[number] = bool(facts.writes)
        self._inside.written |= self._addresses(list(facts.written(args, kwargs)))
        result = func(*args, **kwargs)
        for position, tensor in enumerate(tensors_in(result)):
            dense = dense_of(tensor)
            if dense is not None:
                self._made.setdefault(_key(dense), (dense, (number, position)))
        return result

    def _enter(self, fqn: str, name: str, _module: nn.Module, _args: Any) -> None:
        if not name and fqn not in self.forwards:
            self._inside = self.forwards[fqn] = BlockForward()
            self._made = {}
        self._stack.append(name)

    def _leave(self, name: str, _module: nn.Module, _args: Any, results: Any) -> None:
        """Note the results of the module that is left; leaving the block itself ends the notes."""
        self._stack.pop()
        if self._inside is None:
            return
        if not name:
            self._inside = None
            return
        self._inside.results[name] = self._inside.results.get(name, set()) | self._addresses(results)

    def _addresses(self, values: Any) -> set[Address]:
        """Return what makes the storages of the tensors in `values`, of those that the block makes."""
        storages = [_key(dense) for dense in map(dense_of, tensors_in(values)) if dense is not None]
        return {self._made[key][1] for key in storages if key in self._made}


def _key(dense: Tensor) -> int:
    key: int = dense.untyped_storage()._cdata  # noqa: SLF001 (the identity that storages have)
    return key

"""The submodule of a block that calls each operator, by the numbers that plans give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from strategies.base import RunnableStep
from strategies.budget.eager.block_tape import Address
from strategies.estimate.flops import flops_of
from strategies.estimate.liveness import key_of
from strategies.estimate.tensors import tensors_in
from strategies.step.memory_layout import dense_of
from strategies.step.operator_facts import facts_of, fake_mode, is_numbered
from strategies.step.operator_mode import OperatorMode
from strategies.tracing.without_data import models_errors
from strategies.written.heavy_operators import UNKNOWN_BYTES, HeavyOperator
from strategies.written.runtime.kept_results import Rules

_FOLLOWED = "a step on tensors without memory says which operators there are, and the model raises"


@dataclass(kw_only=True, slots=True, eq=False)
class BlockForward:
    """The operators of a block's first forward.

    Fields:
        operators: name of each operator, by number.
        modules: FQN inside the block of the innermost submodule that calls each; empty where it is the block.
        results: operator and result that make the storages of a submodule's results, by FQN inside the block;
            without those that the block has not made.
        written: operator and result that make the storages that a later operator writes to in place.
        reads: numbers of the operators whose results each operator reads.
        heavy: number, rule, FLOPs and bytes of results of each operator that costs FLOPs, by number.
        last_saved: number of the last operator that makes what autograd saves; -1: nothing is saved.
    """

    operators: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    results: dict[str, set[Address]] = field(default_factory=dict)
    written: set[Address] = field(default_factory=set)
    reads: list[set[int]] = field(default_factory=list)
    heavy: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    last_saved: int = -1

    def heavy_operators(self, fqn: str) -> tuple[HeavyOperator, ...]:
        """Return the operators that cost FLOPs, as those of the block `fqn`."""
        written = {operator for operator, _ in self.written}
        return tuple(
            HeavyOperator(
                fqn=fqn,
                rule=rule,
                number=number,
                flops=flops,
                result_bytes=result_bytes,
                runs_again=number <= self.last_saved,
                is_written=number in written,
            )
            for number, (rule, flops, result_bytes) in self.heavy.items()
        )


def heavy_operators(
    step: RunnableStep, blocks: Mapping[str, nn.Module]
) -> dict[str, tuple[HeavyOperator, ...]]:
    """Return the operators of `blocks` that cost FLOPs, by FQN, as they are in `step`."""
    forwards = block_forwards(step, blocks)
    return {fqn: forward.heavy_operators(fqn) for fqn, forward in forwards.items()}


def block_forwards(step: RunnableStep, blocks: Mapping[str, nn.Module]) -> dict[str, BlockForward]:
    """Return the forwards of `blocks`, by FQN, as they are in `step`."""
    with models_errors(_FOLLOWED, "it must not read values of tensors"), step.around():
        follower = _Follower()
        with follower.around(blocks), follower:
            step.run()
    return follower.forwards


class _Follower(OperatorMode):
    """Notes the operators of blocks, and who calls them. `forwards`: what was noted, by FQN."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: dict[str, BlockForward] = {}
        self._fakes = fake_mode()
        self._inside: BlockForward | None = None
        self._stack: list[str] = []
        self._made: dict[int, tuple[Tensor, Address]] = {}
        self._named: set[tuple[str, str]] = set()
        self._rules = Rules("", frozenset(), {}, self._named, again=False)

    @contextmanager
    def around(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow the calls of `blocks` and of what lies in them."""
        with ExitStack() as hooks:
            for fqn, block in blocks.items():
                for name, module in block.named_modules():
                    entered = partial(self._enter, fqn, name)
                    hooks.callback(module.register_forward_pre_hook(entered).remove)
                    hooks.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            hooks.enter_context(saved_tensors_hooks(self._pack, _same))
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note it."""
        if self._inside is None or not is_numbered(func, self._fakes):
            return func(*args, **kwargs)
        number, facts = len(self._inside.operators), facts_of(func)
        self._inside.operators.append(facts.name)
        self._inside.modules.append(self._stack[-1])
        self._inside.reads.append({operator for operator, _ in self._addresses((args, kwargs))})
        self._inside.written |= self._addresses(list(facts.written(args, kwargs)))
        rule = self._rules.rule(func)
        result = func(*args, **kwargs)
        new_bytes = 0
        for position, tensor in enumerate(tensors_in(result)):
            dense = dense_of(tensor)
            if dense is not None and key_of(dense) not in self._made:
                self._made[key_of(dense)] = (dense, (number, position))
                new_bytes += dense.untyped_storage().nbytes()
        if rule is not None:
            self._named.add(("", rule))
            self._inside.heavy[number] = rule, *_cost(func, args, kwargs, result, new_bytes)
        return result

    def _enter(self, fqn: str, name: str, _module: nn.Module, _args: Any) -> None:
        if not name and fqn not in self.forwards:
            self._inside = self.forwards[fqn] = BlockForward()
            self._made, self._named = {}, set()
            self._rules = Rules("", frozenset(), {}, self._named, again=False).begun()
        elif name and self._inside is not None:
            self._rules.enter(name)
        self._stack.append(name)

    def _leave(self, name: str, _module: nn.Module, _args: Any, results: Any) -> None:
        """Note the results of the module that is left; leaving the block itself ends the notes."""
        self._stack.pop()
        if self._inside is None:
            return
        if not name:
            heavy = self._inside.heavy.items()  # but the products that turned out to be parts of attention
            self._inside.heavy = {number: each for number, each in heavy if ("", each[0]) in self._named}
            self._inside = None
            return
        self._rules.stack.pop()
        self._inside.results[name] = self._inside.results.get(name, set()) | self._addresses(results)

    def _pack(self, saved: Tensor) -> Tensor:
        if self._inside is not None:
            numbers = [operator for operator, _ in self._addresses(saved)]
            self._inside.last_saved = max(self._inside.last_saved, *numbers, -1)
        return saved

    def _addresses(self, values: Any) -> set[Address]:
        """Return what makes the storages of the tensors in `values`, of those that the block makes."""
        storages = [key_of(dense) for dense in map(dense_of, tensors_in(values)) if dense is not None]
        return {self._made[key][1] for key in storages if key in self._made}


def _cost(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, result_bytes: Any
) -> tuple[int, int]:
    """Return FLOPs and bytes of results of an operator; nothing and `UNKNOWN_BYTES` where data decides."""
    try:
        return flops_of(func, args, kwargs, result), int(result_bytes)
    except GuardOnDataDependentSymNode:  # as of experts
        return 0, UNKNOWN_BYTES


def _same(saved: Tensor) -> Tensor:
    return saved

"""The region of a planned block: what autograd saves of it is kept, moved, or made again by its operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.fsdp import FSDPModule

from strategies.base import Observation, StrategyError
from strategies.budget.eager.block_tape import BlockTape, Fates
from strategies.budget.eager.chained_tape import ChainedTape
from strategies.budget.eager.group_tape import Group
from strategies.budget.plan import BlockPlan
from strategies.estimate.tensors import tensors_in
from strategies.regions.host_copies import HostLedger
from strategies.regions.inner_units import gathered_aside, inner_units
from strategies.regions.recomputation import Recomputation
from strategies.regions.region import Unobserved
from strategies.regions.rewind import state_around
from strategies.regions.saved_tensors import packing
from strategies.step.call_sizes import (
    FIRST_CALL,
    OTHER_OPERATORS,
    OTHERS_BEFORE,
    difference,
    input_key,
    input_sizes,
    parameter_sizes,
    size_key,
)
from strategies.step.operator_order import KnownOrders
from strategies.step.sizes import TensorSize


@dataclass(kw_only=True, slots=True, eq=False)
class PlannedBlock:
    """The state that the regions of one plan share: of a block and its caller, or of the plan's modules.

    Fields:
        plan: the plan; of a chain those of its blocks as one.
        ledger: the host copies of the model.
        parts: the plans of the blocks of a chain, each alone.
        group: the group that the plan puts the block in.
        is_of_other_size: whether what calls the block has got inputs for which its plan is not made.
    """

    plan: BlockPlan
    ledger: HostLedger
    parts: Sequence[BlockPlan] = ()
    group: Group | None = None
    is_of_other_size: bool = False
    _fates: Fates = field(init=False)
    _open: BlockTape | None = None
    _next: int = 0
    _told: set[str] = field(default_factory=set)
    _orders: KnownOrders = field(default_factory=KnownOrders)

    def __post_init__(self) -> None:
        self._fates = Fates.of(self.plan)

    @property
    def last(self) -> int:
        """The number of the last module."""
        return max(len(self.plan.modules) - 1, 0)

    def begun(
        self,
        region: Any,
        module: nn.Module,
        inputs: Iterable[Tensor],
        *,
        is_exact: bool = True,
        is_own: bool = False,
        key: Any = None,
    ) -> BlockTape:
        """Return the tape of a call that begins with `module`, in place of one that has not ended.

        Args:
            region: what carries the plan out.
            module: the module.
            inputs: tensors that it is called with.
            is_exact: refuse operators that were not planned.
            is_own: whether the operators before the block are none of the plan's.
            key: the same object for calls of equal sizes; `None` where nothing is known of that.
        """
        self._end_early()
        if self.plan.offload:
            self.ledger.begin_forward()
        fates = Fates.of(self.plan.parted()[1]) if is_own else self._fates
        kind = ChainedTape if self.parts else BlockTape
        tape = (
            kind(fates, self.ledger, region, is_exact=is_exact)
            if self.group is None
            else self.group.tape(fates, self.ledger, region, module, is_exact=is_exact)
        )
        if self._orders.begin(key):
            tape.take_order(self._orders.order, inputs)
        tape.offer(inputs)
        return tape

    def end(self, tape: BlockTape) -> None:
        """End a call that has come to all of its modules."""
        tape.finish()
        self._orders.end(tape.order, is_in_order=tape.is_in_order)

    @contextmanager
    def followed(self, region: Any, module: nn.Module) -> Iterator[None]:
        """Follow what `module` does inside the scope, before it calls the block."""
        tape = self.begun(region, module, ())
        self._open, self._next = tape, 0
        tape.begin_before()
        try:
            yield
        finally:
            tape.end_before()
            if self._open is tape:
                self._open = None
                tape.close()

    def reached(
        self, region: Any, module: nn.Module, inputs: Iterable[Tensor], *, is_exact: bool, key: Any = None
    ) -> BlockTape | None:
        """Return the tape of a call that has come to the block; `None` where a compiled one has none.

        If what ran before it was not as planned, the block follows its own part of the plan.
        """
        given = list(inputs)
        tape, self._open = self._open, None
        is_of_other_size, self.is_of_other_size = self.is_of_other_size, False
        if tape is not None and tape.reach(module, given, is_exact=is_exact):
            if self._orders.begin(key):
                tape.take_order(self._orders.order, given)
            tape.offer(given)
            return tape
        if is_exact and not is_of_other_size:
            self.warn(OTHERS_BEFORE)
        is_compiled = len(self.plan.before) == self.plan.operators
        return None if is_compiled else self.begun(region, module, given, is_exact=is_exact, is_own=True)

    def resumed(
        self, region: Any, number: int, inputs: Iterable[Tensor], *, is_exact: bool, key: Any = None
    ) -> BlockTape | None:
        """Return the tape of the call that has come to its module of that number.

        One that is called without those before it, such as a head that is called twice, has none; a block of
        a chain has one of its own.
        """
        if number != self._next:
            self._end_early()
        tape, self._open = self._open, None
        if tape is not None:
            tape.resume(list(inputs))
            if not self._orders.resume(number, key):
                tape.leave_order()
        elif self.parts:
            tape = BlockTape(Fates.of(self.parts[number]), self.ledger, region, is_exact=is_exact)
            self._orders.begin(None)
        return tape

    def pause(self, tape: BlockTape, number: int, results: Iterable[Tensor]) -> None:
        """Wait for the module of that number, or for backward, whichever comes first."""
        self._open, self._next = tape, number
        tape.pause(results, self._end_early)

    def _end_early(self) -> None:
        """End a call whose other modules have not been called."""
        tape, self._open = self._open, None
        if tape is not None:
            self._orders.begin(None)
            tape.finish_early()
            tape.close()

    def warn(self, problem: str) -> None:
        """Warn once of a problem."""
        if problem not in self._told:
            self._told.add(problem)
            warnings.warn(problem, stacklevel=2)


def _always() -> bool:
    return True


def _checkpoint() -> Recomputation:
    return Recomputation(preserve_rng_state=True, early_stop=True, use_reentrant=False)


@dataclass(kw_only=True, slots=True, eq=False)
class PlannedModule:
    """A region that carries out the plan of one block, or of one of its modules.

    Saved: the storages that the plan keeps, and the inputs of the operators that run again.
    Recomputed: the operators that lead to the other storages that backward needs, each once. Python code does
        not run again, so no state of modules, Python or NumPy matters; random numbers are put back. A block
        that the plan runs again as a whole has the checkpoint of `ac=full` instead.
    Moved: the storages that the plan offloads, once to the host and once back.

    Fields:
        block: the plan.
        number: number of the module among those of the plan.
        is_for_training: whether the module was in training mode when it got the plan; it runs untouched in
            evaluation mode then, which has other operators.
        is_compiled: whether the module runs as compiled code, of which the tape has no operators.
    """

    block: PlannedBlock
    number: int = 0
    is_for_training: bool = False
    is_compiled: bool = False
    _checkpoint: Recomputation = field(default_factory=_checkpoint)
    _has_run: bool = False
    _planned_key: list[Any] | None = None
    _units: list[FSDPModule] | None = None

    def __call__(
        self,
        module: nn.Module,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`, with what autograd saves of it as planned.

        Smaller inputs may have other operators, as a batch of one often has. What follows the first of them
        is recomputed, and Python warns once. So it is in a first call that makes what later calls find.
        It warns, too, where other operators ran before a block whose plan has some of them; these stay then.

        Raises:
            StrategyError: forward gets larger inputs, runs other operators on inputs of the planned sizes, or
                is compiled, and the plan is for eager operators.
        """
        block = self.block
        if not self.is_compiled:
            refuse_compiled(block.plan.fqn, module)
        is_other_mode = self.is_for_training and not module.training
        if block.plan.plain or is_other_mode or not torch.is_grad_enabled():
            return body(*args, **kwargs)
        if block.plan.rerun:
            self._is_exact(module, args, kwargs)
            return self._checkpoint(module, body, args, kwargs)
        tape = self._tape(module, args, kwargs)
        if tape is None:
            return body(*args, **kwargs)
        tape.follows(module)
        is_as_found = _always if self._has_run or self.is_compiled else state_around(module)
        tape.may_be_first = is_as_found is not _always
        is_paused = False
        try:
            tape.units = self._inner_units(module)
            around = nullcontext() if self.is_compiled else tape
            with packing(tape.pack), around, gathered_aside(tape.units, tape.aside):
                results = body(*args, **kwargs)
            self._require_planned(tape, is_as_found)
            if tape.waits and self.number < block.last:
                block.pause(tape, self.number + 1, tensors_in(results))
                is_paused = True
            else:
                tape.hand_on(tensors_in(results))
                block.end(tape)
                self._require_planned(tape, is_as_found)
        finally:
            if not is_paused:
                tape.close()
        self._has_run = True
        if not tape.is_as_planned:
            block.warn(FIRST_CALL if tape.is_first else OTHER_OPERATORS)
        return results

    def _require_planned(self, tape: BlockTape, is_as_found: Callable[[], bool]) -> None:
        """Refuse a call that was not the planned one, unless it has made what later calls find.

        A table that a module makes once, and keeps as an attribute, is there in the step of which plans are
        made. A first call has the operators that make it.

        Raises:
            StrategyError: the module holds what it held before.
        """
        refusal, tape.refusal = tape.refusal, None
        if refusal is None:
            return
        if is_as_found():
            raise refusal
        tape.is_first = True

    def _inner_units(self, module: nn.Module) -> list[FSDPModule]:
        """Return the units inside the module, which are found at the first call: it may be sharded before."""
        if self._units is None:
            self._units = inner_units(module)
        return self._units

    def _tape(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockTape | None:
        """Return the tape of the call, `None` where it runs untouched."""
        block, inputs = self.block, tensors_in((args, kwargs))
        is_exact = self._is_exact(module, args, kwargs)
        key = self._planned_key if is_exact and not self.is_compiled else None
        if self.number:
            return block.resumed(self, self.number, inputs, is_exact=is_exact, key=key)
        if block.plan.caller is None:
            return block.begun(self, module, list(inputs), is_exact=is_exact, key=key)
        return block.reached(self, module, inputs, is_exact=is_exact, key=key)

    @property
    def _own(self) -> BlockPlan:
        """The plan that has the sizes of the module."""
        return self.block.parts[self.number] if self.block.parts else self.block.plan

    def _is_exact(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether a call has the planned sizes; refuse larger inputs, and other parameters."""
        plan = self._own
        if not plan.sizes:
            return True
        name = plan.modules[self.number] if plan.modules else ""
        if name and self.number:  # sizes of inputs belong to the first module of a call
            args, kwargs = (), {}
        # a checkpoint asks for the parameters itself
        key = input_key(args, kwargs) if plan.rerun else size_key(module, args, kwargs)
        if key == self._planned_key:
            return True
        planned = self._planned_sizes(name)
        found = (*input_sizes(args, kwargs), *parameter_sizes(module, name))
        if found == planned:
            self._planned_key = key
            return True
        unlike = difference(planned, found)
        if unlike is not None:
            problem = f"the plan of {plan.fqn!r} was {unlike}; make it again for these sizes"
            raise StrategyError("ac", problem)
        return False

    def _planned_sizes(self, name: str) -> tuple[TensorSize, ...]:
        """Return the planned sizes of the module, by its name where a call has several."""
        return tuple(
            size
            for size in self._own.sizes
            if size.name.startswith(f"parameter {name}." if name else "")
            or (not self.number and not size.name.startswith("parameter "))
        )

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the ledger."""
        return Observation(offloaded_bytes=self.block.ledger.offloaded_bytes)


@dataclass(kw_only=True, slots=True, eq=False)
class PlannedCaller(Unobserved):
    """The region of the module that calls a block, of whose operators before it the block's plan has some.

    Fields:
        block: the plan of the block.
        is_for_training: whether the module was in training mode when it got the plan.
    """

    block: PlannedBlock
    is_for_training: bool = False

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`; inputs of other sizes than the planned ones are not followed.

        Raises:
            StrategyError: it is compiled.
        """
        plan = self.block.plan
        refuse_compiled(plan.caller or "", module)
        is_other_mode = self.is_for_training and not module.training
        if plan.plain or is_other_mode or not torch.is_grad_enabled():
            return body(*args, **kwargs)
        found = input_sizes(args, kwargs)
        # smaller ones need no more bytes; where larger ones are refused, the block or its compiler says so
        self.block.is_of_other_size = found != plan.caller_sizes and (
            not plan.sizes or difference(plan.caller_sizes, found) is None
        )
        if found != plan.caller_sizes:
            return body(*args, **kwargs)
        with self.block.followed(self, module):
            return body(*args, **kwargs)


def refuse_compiled(fqn: str, module: nn.Module) -> None:
    """Refuse a module that `Module.compile` has compiled, and one whose caller is compiled.

    Args:
        fqn: name of the module, for the error.
        module: the module, in its call.

    Raises:
        StrategyError: the tape follows eager operators.
    """
    # Dynamo of torch 2.15 turns an error that it traces into a break of the graph, and goes on listening
    is_inside = torch.compiler.is_compiling() or get_eval_frame_callback() not in {None, False}
    if module._compiled_call_impl is not None or is_inside:  # noqa: SLF001 (set by compile)
        torch.compiler.disable(_refuse_compiled)(fqn)  # that of torch 2.11 raises no error that it traces


def _refuse_compiled(fqn: str) -> NoReturn:
    where = repr(fqn) if fqn else "the model"
    problem = f"{where} is compiled, and its plan follows the operators of eager blocks"
    raise StrategyError("ac", f"{problem}; use ac=compiler_budget, or compile nothing around or inside it")

"""Capturing a training step: its operators, and what autograd saves of each block, on real or fake tensors.

Autograd gets a copy of what it saves of a block's own storages and of its inputs, made at the moment of its
use and seen by no meter. So the captured lives are those of a forward whose values nobody holds for backward,
and each use in backward is known to the moment: plans are the differences.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from strategies.base import StrategyError
from strategies.estimate.liveness import numbers_bytes
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import machine_for
from strategies.estimate.patched import wrapped
from strategies.estimate.tensors import gradients_of, plain_tensors, tensors_in
from strategies.generators import NUMPY, PYTHON, DrawWatch, moved
from strategies.last_words import refuses_hooks
from strategies.regions.blocks import Enclosed, ModelModules
from strategies.regions.inner_units import gathered_aside, inner_units
from strategies.regions.kept_results import loses_history
from strategies.regions.recomputation import can_run_again
from strategies.regions.region import Region, Unobserved, enclose, region_of
from strategies.regions.rewind import python_state
from strategies.regions.saved_tensors import Packed, hooks_around, kept, local_of, placed_as, unpacked
from strategies.regions.split_backward import runs_again
from strategies.step.before_blocks import Before, join, joined, signature_of
from strategies.step.call_sizes import input_sizes, parameter_sizes, sizes_of
from strategies.step.late_value import AskedAgain, JustSaved, given
from strategies.step.ledger import is_on_device
from strategies.step.memory_layout import MemoryLayout, dense_of
from strategies.step.needed import needed
from strategies.step.operator_facts import OperatorFacts, facts_of, fake_mode, is_numbered
from strategies.step.operator_mode import OperatorMode
from strategies.step.position import Position, running_node
from strategies.step.sizes import TensorSize
from strategies.step.step_graph import (
    OUTSIDE,
    BlockCall,
    Checkpointed,
    Redemption,
    StepGraph,
    StepOperator,
    is_written,
)
from strategies.step.step_recorder import RecordedOperator, StepRecorder

RunStep: TypeAlias = Callable[[], object]
"""Runs forward and backward of a step, and whatever else belongs to it."""

_CHECKPOINT = "torch.utils.checkpoint."
_OWN_HOOKS = "have checkpoints of their own, or other hooks on saved tensors"
_TWICE = "backward runs through a second time, as retain_graph and create_graph let it"
_FUNCTIONAL = "differentiate by torch.func, which refuses hooks on saved tensors"
_LOST = "write to views by an operator on many tensors, which autograd loses under a tape"
_COMPILED = "CompiledFunction"
"""Name of a node that runs a graph, whose tensors a partition holds and no tape."""


def capture(
    run_step: RunStep,
    modules: ModelModules,
    *,
    device: torch.device,
    standing: Iterable[Tensor] = (),
    bodies: Mapping[str, Callable[..., Any]] | None = None,
    lasting: AbstractSet[str] = frozenset(),
) -> StepGraph:
    """Return the graph of the step that `run_step` runs.

    A mode of fake tensors stands around `capture`, not in `run_step`; one step was run before.

    Args:
        modules: what a plan will decide about; no block is inside another. Modules beside the blocks that run
            behind all of them are one call. What their caller makes the first block's input of belongs to the
            call of that.
        standing: tensors that lie on the device during the whole step; what operators read is found anyway.
        bodies: compiled functions that run in place of the forward of blocks. Graphs have no place to put a
            generator back, so their random operators do not run again; inputs of blocks stay where they are.
        lasting: names of operators that do not run again either.

    Raises:
        StrategyError: a block is enclosed by a region already, or none of them ran.
    """
    blocks = modules.blocks
    for fqn, block in blocks.items():
        if isinstance(block, Enclosed):
            raise StrategyError("ac", f"{fqn!r} is already checkpointed; capture the step of a plain model")
    make = partial(_Watch, device, may_draw_again=bodies is None, lasting=lasting)
    without_hooks = set[str]()
    while True:
        watch = make(without_hooks=without_hooks)
        try:
            gradients = _watched(watch, run_step, modules, standing, bodies or {})
            break
        except _RefusesHooks as error:
            if dist.is_initialized() and dist.get_world_size() > 1:  # others take the step once
                raise StrategyError(error.where, error.problem) from error  # whose name says what it is
            without_hooks.add(error.fqn)
    if not watch.calls:
        problem = f"no block ran in the step; blocks are {', '.join(blocks)}"
        raise StrategyError("ac.layers_fqn", f"{problem}; name modules that the model calls")
    return watch.graph(gradients)


def _watched(
    watch: _Watch,
    run_step: RunStep,
    modules: ModelModules,
    standing: Iterable[Tensor],
    compiled: Mapping[str, Callable[..., Any]],
) -> frozenset[int]:
    """Let `watch` see the step; return the storages of gradients."""
    every = modules.all()
    parameters = [each for module in every.values() for each in plain_tensors(module.parameters())]

    def listening(fqn: str) -> Region:
        if fqn in modules.blocks:
            return _Listening(fqn, watch, compiled.get(fqn))
        return _Beside(fqn, watch) if fqn in modules.beside else _Calling(fqn, watch)

    calling = dict([modules.caller] if modules.caller else [])
    with enclosed({**every, **calling}, listening), watch:
        watch.add_standing(plain_tensors([*standing, *parameters]))
        run_step()
        gradients = watch.numbers([each for module in every.values() for each in gradients_of(module)])
    return frozenset(gradients)


class _RefusesHooks(StrategyError):  # noqa: N818 (it says what is wrong)
    """A module differentiates by torch.func, which no hooks on saved tensors can follow.

    Attributes:
        fqn: the module.
    """

    def __init__(self, fqn: str) -> None:
        problem = "differentiates by torch.func, which refuses hooks on saved tensors"
        remedy = "use ac=none, or ac=selective_layer without this block"
        super().__init__("ac", f"{fqn!r} {problem}, and with them a plan; {remedy}")
        self.fqn = fqn


@contextmanager
def enclosed(blocks: Mapping[str, nn.Module], region_of: Callable[[str], Region]) -> Iterator[None]:
    """Put a region around each block inside the scope.

    Args:
        blocks: modules by plain FQN.
    """
    with ExitStack() as regions:
        for fqn, block in blocks.items():
            regions.callback(_restored(block))
            enclose(block, region_of(fqn), holds_call=False)
        yield


def _restored(block: nn.Module) -> Callable[[], None]:
    """Return what takes the region from `block` again, and puts an earlier one back."""
    original, earlier = type(block), region_of(block)

    def restore() -> None:
        block.__class__ = original
        if earlier is not None:
            enclose(block, earlier, holds_call=False)
        else:
            vars(block).pop("_acbench_region")

    return restore


class _Listening(Unobserved):
    """The region of a block whose step is captured."""

    def __init__(self, fqn: str, watch: _Watch, compiled: Callable[..., Any] | None) -> None:
        self._fqn = fqn
        self._watch = watch
        self._compiled = compiled

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward of a block and watch it, where gradients are on."""
        body = self._compiled or body
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        if running_node() is not None or _packer().startswith(_CHECKPOINT):
            problem = (
                "runs inside of a checkpoint of the model's own, which recomputes what a plan would keep"
            )
            raise StrategyError("ac", f"{self._fqn!r} {problem}; take that checkpoint away")
        call = BlockCall(
            fqn=self._fqn,
            start=self._watch.ledger.moment,
            sizes=sizes_of(module, args, kwargs),
            inputs={} if self._compiled and self._watch.calls else self._watch.made_inputs((args, kwargs)),
        )
        if self._compiled is None:
            self._watch.note_checkpoint(call.checkpointed, module, (args, kwargs))
        self._watch.begin_block(call)
        numbers, autocasts = [PYTHON.now(), NUMPY.now()], list[torch.autocast]()

        def enter(original: Callable[..., Any], autocast: torch.autocast) -> Any:
            autocasts.append(autocast)
            return original(autocast)

        with (
            gathered_aside(inner_units(module), self._watch.aside),
            wrapped(torch.autocast, "__enter__", enter),
        ):
            results = self._watch.run_part(self._fqn, partial(body, *args, **kwargs))
        # a checkpoint's own autocast around one inside keeps the casts of that one
        call.checkpointed.is_possible &= not (moved(numbers) or autocasts)
        return results


class _Beside(Unobserved):
    """The region of a module that stands next to the blocks."""

    def __init__(self, fqn: str, watch: _Watch) -> None:
        self._fqn = fqn
        self._watch = watch
        self._has_run = False

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward; watch the first one behind a block that no block, checkpoint or backward runs."""
        if self._has_run or not self._watch.is_behind_a_block or not _is_plain_forward():
            return body(*args, **kwargs)
        self._has_run = True
        self._watch.begin_beside(self._fqn, module, args, kwargs)
        return self._watch.run_part(self._fqn, partial(body, *args, **kwargs))


class _Calling(Unobserved):
    """The region of the module that calls the blocks."""

    def __init__(self, fqn: str, watch: _Watch) -> None:
        self._fqn = fqn
        self._watch = watch

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward; watch what the first one does before it calls a block."""
        del module
        if self._watch.calls or not _is_plain_forward():
            return body(*args, **kwargs)
        with self._watch.before_blocks(self._fqn, input_sizes(args, kwargs)):
            return body(*args, **kwargs)


class _Watch(StepRecorder):
    """Records every operator that plans count, and the calls of blocks."""

    def __init__(
        self,
        device: torch.device,
        *,
        may_draw_again: bool,
        lasting: AbstractSet[str],
        without_hooks: AbstractSet[str],
    ) -> None:
        super().__init__(Position(), device=device.type)
        self._may_draw_again, self._lasting, self._without_hooks = may_draw_again, lasting, without_hooks
        self.calls: list[BlockCall] = []
        self._machine: Machine = machine_for(device)
        self._operators: list[StepOperator] = []
        self._inside = OUTSIDE
        self._is_open = False  # the last call is of modules next to the blocks
        self._before: Before | None = None
        self._before_mode: _AsTaped | None = None
        self._pack: Callable[[Tensor], Callable[[], Tensor]] | None = None
        self._fakes = fake_mode()
        self._makers: dict[int, int] = {}  # call that made a storage
        self._of_part: set[int] = set()  # storages that the part of a call that runs now has made
        self._original: dict[int, int] = {}  # storage that a copy stands for
        self._savings: list[_Saving] = []
        self._saved = JustSaved(self.number)
        self._tickets: list[weakref.ref[Any]] = []
        self._is_as_found: dict[
            int, Callable[[], bool]
        ] = {}  # by identity of a call's facts, until it is asked

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note it."""
        self._saved.before(func, args)
        if not is_numbered(func, self._fakes):
            return self.followed(func, args, kwargs)[0]
        facts = facts_of(func)
        draws = (
            DrawWatch(each.device for each in tensors_in((args, kwargs)))
            if facts.is_untagged and self._fakes is None
            else None
        )
        first = len(self.ledger.lives)
        is_lost = loses_history(func, args, kwargs)
        result, recorded = self.recorded(func, args, kwargs)
        has_drawn = facts.draws(args, kwargs) or (draws is not None and draws.has_drawn())
        self._makers |= dict.fromkeys(recorded.makes, self._inside)
        self._of_part.update(recorded.makes)
        operator = self._planned(recorded, func, args, has_drawn=has_drawn)
        if facts.is_untold and recorded.writes.isdisjoint(self._makers):
            operator.forgoes, operator.reads = facts.forgoes(args, kwargs), operator.reads - operator.writes
        made = range(first, len(self.ledger.lives))
        operator.others = tuple(number for number in made if number not in recorded.makes)
        self._operators.append(operator)
        if self._inside != OUTSIDE:
            call = self.calls[self._inside]
            call.operators.append(len(self._operators) - 1)
            hooks = hooks_around()
            if hooks is not None and hooks[0] is not self._pack:
                call.stays_because = _OWN_HOOKS
            if is_lost:
                self.calls[self._inside].stays_because = _LOST
        elif self._before_mode is not None and not self.calls:
            self._note_before(facts, args, kwargs)
        return result

    def _note_before(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the latest operator ran before the blocks, and whether a tape could follow it."""
        assert self._before is not None, "its mode is on"
        index = len(self._operators) - 1
        self._before.operators[index] = signature_of(facts.name, (args, kwargs))
        written = tensors_in(list(facts.written(args, kwargs)))
        if facts.moves_memory or any(dense_of(each) is None for each in written):
            self._before.unsafe.add(index)

    def _planned(
        self, recorded: RecordedOperator, func: Any, args: tuple[Any, ...], *, has_drawn: bool
    ) -> StepOperator:
        """Return the entry of an operator that has just run, with what a plan must know of it."""
        work, facts = recorded.work, facts_of(func)
        stays = facts.communicates or facts.name in self._lasting
        is_work = recorded.makes or recorded.writes
        seconds = work.seconds(self._machine) if is_work else 0.0
        if work.is_uncounted:  # of which no more is known than its seconds
            work = work._replace(flops=self._machine.flops_in(seconds))
        is_inside = self._inside != OUTSIDE
        return StepOperator(
            work=work,
            start=recorded.start,
            end=recorded.end,
            reads=recorded.reads,
            writes=recorded.writes,
            makes=recorded.makes,
            node=recorded.node,
            call=self._inside,
            ordinal=len(self.calls[self._inside].operators) if is_inside else OUTSIDE,
            is_forward=not recorded.node or is_inside,
            seconds=seconds,
            private_bytes=numbers_bytes(func, args),
            random_states=int(has_drawn and self._may_draw_again),
            is_repeatable=not stays and (self._may_draw_again or not has_drawn),
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let what runs inside the scope be outside of all calls."""
        inside, self._inside = self._inside, OUTSIDE
        try:
            yield
        finally:
            self._inside = inside

    def storages(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of storages; copies of what autograd saved pass for their originals."""
        return frozenset(self._original.get(number, number) for number in super().storages(tensors))

    def made_inputs(self, values: Any) -> dict[int, int]:
        """Return the storages of inputs that an operator of the step has made, with their numbers."""
        found: dict[int, int] = {}
        for number, tensor in enumerate(tensors_in(values)):
            local = local_of(tensor)
            storage = None if local is None or local.is_conj() or local.is_neg() else self.number(local)
            if storage is not None and storage in self._makers:
                found.setdefault(storage, number)
        return found

    @property
    def is_behind_a_block(self) -> bool:
        """True if a block has run, and no forward runs now that is watched."""
        return self._inside == OUTSIDE and bool(self.calls)

    @contextmanager
    def before_blocks(self, caller: str, sizes: tuple[TensorSize, ...]) -> Iterator[None]:
        """Note what runs inside the scope, until the first block does."""
        self._before = Before(caller=caller, sizes=sizes, start=self.ledger.moment)
        self._before_mode = _AsTaped()
        self._before_mode.__enter__()
        try:
            yield
        finally:
            self._leave_before()

    def _leave_before(self) -> bool:
        """Note nothing more before the blocks; say whether the modes are as they were then."""
        mode, self._before_mode = self._before_mode, None
        if mode is None or _get_current_dispatch_mode() is not mode:
            self._before_mode = mode  # until that of somebody else is gone
            return False
        mode.__exit__(None, None, None)
        return True

    def begin_beside(
        self, fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin the forward of a module next to the blocks: a call, or the next part of the open one."""
        if not self._is_open:
            call = BlockCall(
                fqn=fqn,
                start=self.ledger.moment,
                sizes=input_sizes(args, kwargs),
                inputs=self.made_inputs((args, kwargs)),
            )
            self.calls.append(call)
            self._is_open = True
        call = self.calls[-1]
        call.modules.append(fqn)
        call.sizes = (*call.sizes, *parameter_sizes(module, fqn))

    def begin_block(self, call: BlockCall) -> None:
        """Begin the forward of a block. Raises StrategyError: it runs inside another block."""
        if self._inside != OUTSIDE:
            raise StrategyError("ac.layers_fqn", f"{call.fqn!r} runs inside another block")
        if self._is_open:
            self._dissolve()
            self._is_open = False
        if not self.calls and self._before is not None and self._leave_before():
            made = {s for index in self._before.operators for s in self._operators[index].makes}
            self._before.given = frozenset(made.intersection(call.inputs))
        self.calls.append(call)

    def note_checkpoint(self, facts: Checkpointed, module: nn.Module, given: Any) -> None:
        """Note what a checkpoint would hold of a call that begins, and what its Python code finds."""
        facts.given = self.storages(tensors_in(given))
        facts.is_possible = can_run_again(module)
        if facts.is_possible:
            self._is_as_found[id(facts)] = python_state(module)

    def _note_asked(self, facts: Checkpointed) -> None:
        """Note that backward asks for something that a call has saved."""
        if facts.asked is None:
            facts.asked = self.ledger.moment
            is_as_found = self._is_as_found.pop(id(facts), None)
            facts.is_possible &= is_as_found is not None and is_as_found()

    def _dissolve(self) -> None:
        """Take the last call for operators outside of blocks."""
        last = len(self.calls) - 1
        for index in self.calls.pop().operators:
            operator = self._operators[index]
            operator.call = operator.ordinal = OUTSIDE
            self._makers |= dict.fromkeys(operator.makes, OUTSIDE)
        for each in self._savings:
            each.call = OUTSIDE if each.call == last else each.call

    def run_part(self, fqn: str, body: Callable[[], Any]) -> Any:
        """Return what a part of the last call returns, and hold nothing of it for backward."""
        number = len(self.calls) - 1
        call = self.calls[number]
        self._inside, self._of_part = number, set()
        self._pack = partial(self._packed, call=number)
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, unpacked)
        if fqn in self._without_hooks:
            call.stays_because, hooks = _FUNCTIONAL, nullcontext()
        try:
            with hooks, _AsTaped():
                return body()
        except RuntimeError as error:
            if not refuses_hooks(error):
                raise
            raise _RefusesHooks(fqn) from error
        finally:
            self._inside, self._pack = OUTSIDE, None
            call.end = self.ledger.moment

    def _packed(self, saved: Tensor, call: int) -> Callable[[], Tensor]:
        """Return what gives a saved tensor back: itself, or a copy that is noted when backward asks."""
        local = local_of(saved)
        storage = None if local is None else self.number(local)
        facts = self.calls[call].checkpointed
        facts.operators = len(self.calls[call].operators)
        facts.waiting += 1
        with _disable_current_modes(), torch.no_grad():
            if local is None or storage is None or not self._is_noted(storage, call):
                return self._held(kept(saved), facts)
            copied = _copy_of(local)
            placed = placed_as(saved) if isinstance(saved, DTensor) else None
            saved_on = saved.device
            layout = MemoryLayout.of(saved, local)
        saving = _Saving(storage, call, layout)
        self._savings.append(saving)
        if storage in self._of_part:
            self._saved.add(saving, storage)

        def redeem() -> Tensor:
            """Return the value, noted as read now, in the placement that was saved."""
            with _disable_current_modes(), torch.no_grad():
                value = _copy_of(copied)
            self._redeem(value, saving)
            result = value if placed is None else placed(value)
            if not is_compiled():
                saving.given.give(result)
            return result

        def is_compiled() -> bool:
            return self._position.node.startswith(_COMPILED)

        def unpack() -> Tensor:
            """Return what backward gets."""
            self._note_asked(facts)
            known = saving.given.value()
            if known is not None:
                facts.is_possible = False  # torch's checkpoint gives a value once
                return known
            if saving.is_done and not is_compiled():
                self.calls[call].stays_because = _TWICE
            saving.is_done = not runs_again()
            if not saving.is_late:
                return redeem()
            late = partial(redeem)
            self._tickets.append(weakref.ref(late, partial(self._leave_node, saving)))
            return given(late, layout, saved_on)

        self._tickets.append(weakref.ref(unpack, partial(self._release, saving, facts)))
        return unpack

    def _held(self, packed: Packed, facts: Checkpointed) -> Packed:
        """Return what gives back a saved tensor that no plan decides about."""
        given_before = AskedAgain()

        def unpack() -> Tensor:
            self._note_asked(facts)
            facts.is_possible &= given_before.value() is None  # as above
            value = packed()
            given_before.give(value)
            return value

        def release(_: weakref.ref[Any]) -> None:
            facts.released = self.ledger.moment
            facts.waiting -= 1

        self._tickets.append(weakref.ref(unpack, release))
        return unpack

    def _release(self, saving: _Saving, facts: Checkpointed, _: weakref.ref[Any]) -> None:
        """Note that the graph has let go of a saved value, before whatever is asked for next."""
        saving.given = AskedAgain()
        saving.released = facts.released = self.ledger.mark_time(saving.storage)
        facts.waiting -= 1

    def _leave_node(self, saving: _Saving, _: weakref.ref[Any]) -> None:
        """Note that the node has let go of a value that it reads late."""
        saving.node_until = self.ledger.moment

    def _is_noted(self, storage: int, call: int) -> bool:
        """Say whether a plan may decide about a storage that a call saves, in that call or in a chain."""
        is_of_call = self._may_draw_again and self._makers.get(storage, OUTSIDE) != OUTSIDE
        return is_of_call or self._is_planned(storage, call)

    def _is_planned(self, storage: int, call: int) -> bool:
        """Say whether a plan may decide about a storage in a call, which has made it or got it as input."""
        return self._makers.get(storage, OUTSIDE) == call or storage in self.calls[call].inputs

    def _redeem(self, value: Tensor, saving: _Saving) -> None:
        """Note that backward asked for a saved value, which is alive from now on."""
        moment = self.ledger.moment
        self.add_made(value, "a saved value")
        number = self.number(value)
        assert number is not None
        self._original[number] = saving.storage
        node = running_node()
        saving.asked.append((number, moment, "" if node is None else str(node.name())))

    def graph(self, gradients: frozenset[int]) -> StepGraph:
        """Return the step; call it after the meter's end."""
        if self._is_open and not any(each.call == len(self.calls) - 1 for each in self._savings):
            self._dissolve()
        if self._before is not None and self._before.given:
            self._join(self._before)
        if not self._may_draw_again:  # inputs of compiled blocks stay where they are
            self.calls[0].inputs = {}
        ledger = self.ledger
        lives = ledger.lives
        changes = [(change.life, change.delta) for change in ledger.changes]
        counted = [is_on_device(life) and number not in self._original for number, life in enumerate(lives)]
        deltas = np.array([delta if counted[life] else 0 for life, delta in changes], dtype=np.int64)
        nbytes = {number: life.nbytes for number, life in enumerate(lives)}
        deaths = dict.fromkeys(range(len(lives)), len(changes))
        largest: dict[int, int] = {}
        running, gathered = dict.fromkeys(range(len(lives)), 0), set()
        for moment, (life, delta) in enumerate(changes):
            if not delta:
                continue
            if not running[life] and life in largest:
                gathered.add(life)
            running[life] += delta
            largest[life] = max(largest.get(life, 0), running[life])
            if delta < 0 and not lives[life].nbytes:
                deaths[life] = moment
        nbytes |= {number: largest[number] for number in largest if lives[number].phase}
        nbytes = {number: size if is_on_device(lives[number]) else 0 for number, size in nbytes.items()}
        held = ledger.start_bytes(is_on_device) + np.concatenate([[0], np.cumsum(deltas)])
        unshared = self._settle(deaths, held, nbytes)
        self._pin_parts(gathered)
        self._pin_written(gathered)
        self._pin_freed({number: _sizes_over_time(changes, number) for number in gathered})
        fixed = set(range(len(lives))) - {life for life, _ in changes}
        return StepGraph(
            operators=self._operators,
            calls=self.calls,
            nbytes=nbytes,
            deaths=deaths,
            held_bytes=held,
            gathered=frozenset(gathered),
            gradients=gradients,
            unshared=unshared,
            fixed_bytes=sum(nbytes[number] for number in fixed),
            device=self._device,
        )

    def _settle(
        self, deaths: dict[int, int], held: npt.NDArray[np.int64], nbytes: Mapping[int, int]
    ) -> dict[int, int]:
        """Note in the calls what backward asks for; what no plan decides about, autograd holds as ever.

        Return the last moments of what is asked for by others than its call, without their asking.
        """

        def hold(storage: int, until: int) -> None:
            if until > deaths[storage]:
                held[deaths[storage] + 1 : until + 1] += nbytes[storage]
                deaths[storage] = until

        self._give_back_shared()
        for each in self._savings:
            released = len(held) - 1 if each.released is None else each.released
            if each.call == OUTSIDE:
                hold(each.storage, released)
                continue
            call = self.calls[each.call]
            if not each.asked and released > call.end:
                hold(each.storage, released)
                call.unasked.add(each.storage)
            elif not each.asked:
                call.dropped[each.storage] = max(released, call.dropped.get(each.storage, -1))
            may_plan = call.stays_because not in {_LOST, _TWICE}
            is_planned = may_plan and self._is_planned(each.storage, each.call)
            found = call.redemptions if is_planned else call.shared
            for number, moment, node in each.asked:
                until = deaths[number]
                times = {"moment": moment, "until": until, "node_until": max(until, each.node_until)}
                found.append(Redemption(storage=each.storage, node=node, released=released, **times))
        shared = [redemption for call in self.calls for redemption in call.shared]
        unshared = {redemption.storage: deaths[redemption.storage] for redemption in shared}
        for redemption in shared:
            hold(redemption.storage, redemption.held_until)
        return unshared

    def _pin_parts(self, gathered: AbstractSet[int]) -> None:
        """Let no operator run again that has not in backward what it had in forward.

        Parameters of modules next to the blocks may be sharded again then; and what runs between two parts of
        a call may have written to what the first has made.
        """
        spoilt = {
            number
            for number, call in enumerate(self.calls)
            if call.modules and is_written(self._operators, set(call.operators), call.end)
        }
        for number, call in enumerate(self.calls):
            for operator in (self._operators[index] for index in call.operators):
                is_beside = call.modules or operator.ordinal < len(call.before)
                if is_beside and (number in spoilt or not operator.reads.isdisjoint(gathered)):
                    operator.is_repeatable = False

    def _pin_written(self, gathered: AbstractSet[int]) -> None:
        """Let no operator run again that reads from outside what others write to before backward asks.

        In no call of its block: a decision may be one about all of them.

        Args:
            gathered: storages that have in backward what they had in forward.
        """
        pinned = set[tuple[str, int]]()
        for call in self.calls:
            own = [self._operators[index] for index in call.operators]
            asked = max((each.moment for each in (*call.redemptions, *call.shared)), default=-1)
            later = self._operators[max(call.operators, default=-1) + 1 :]
            written = {storage for each in later if each.start < asked for storage in each.writes}
            written -= gathered | {storage for each in own for storage in each.makes}
            pinned |= {(call.fqn, each.ordinal) for each in own if not written.isdisjoint(each.reads)}
        for call in self.calls:
            for operator in (self._operators[index] for index in call.operators):
                operator.is_repeatable &= (call.fqn, operator.ordinal) not in pinned

    def _pin_freed(self, sizes: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Let no operator run again that would find weights freed.

        In backward a unit of FSDP inside of a block has its weights once a gradient comes to what it gave.
        Operators run again without the unit, as soon as a value that follows from them is asked for.

        Args:
            sizes: bytes of storages that are gathered in the step, from each moment on.
        """
        for call in self.calls:
            own = [self._operators[index] for index in call.operators]
            read = {each for operator in own for each in operator.reads} & sizes.keys()
            again = call.checkpointed.asked
            if again is not None and not all(_size_at(sizes[number], again) for number in read):
                call.checkpointed.is_possible = False
            moved = {
                number
                for number in read
                if not _size_at(sizes[number], call.start) or not _size_at(sizes[number], call.end)
            }
            makers: dict[int, list[int]] = {}
            for place, operator in enumerate(own if moved else ()):
                for storage in (*operator.makes, *operator.writes):
                    makers.setdefault(storage, []).append(place)

            def before(
                place: int, own: Sequence[StepOperator] = own, makers: Mapping[int, list[int]] = makers
            ) -> Iterable[int]:
                if not own[place].is_repeatable:
                    return ()
                return (maker for storage in own[place].reads for maker in makers.get(storage, ()))

            for each in call.redemptions if moved else ():
                freed = {number for number in moved if not _size_at(sizes[number], each.moment)}
                for place in needed(makers.get(each.storage, ()), before):
                    if not own[place].reads.isdisjoint(freed):
                        own[place].is_repeatable = False

    def _join(self, before: Before) -> None:
        """Let what the first block's inputs are made of belong to its call, if that is its only one."""
        if sum(call.fqn == self.calls[0].fqn for call in self.calls) > 1:  # no other call has it
            return
        asked = {each.storage for each in self._savings if each.call == 0 and each.asked}
        found = joined(before, self.calls[0], self._operators, asked)
        if found:
            self._makers |= join(before, self.calls[0], self._operators, found)

    def _give_back_shared(self) -> None:
        askers: dict[int, set[int]] = {}
        for each in self._savings:
            askers.setdefault(each.storage, set()).add(each.call if each.asked else OUTSIDE)
        for number, call in enumerate(self.calls):
            written = {storage for index in call.operators for storage in self._operators[index].writes}
            call.inputs = {
                storage: place
                for storage, place in call.inputs.items()
                if askers.get(storage) == {number} and storage not in written
            }


@dataclass(slots=True, eq=False)
class _Saving:
    """A value that autograd has saved on a storage in a call.

    Fields:
        storage, call: their numbers; `OUTSIDE` of a call that is none any more.
        layout: where in the storage it lies.
        asked: life of each copy that backward got, the moment, and the name of the node that asked for it.
        released: moment at which the graph let go of it; `None` where it never did.
        is_late: whether backward reads it later than it asks for it.
        is_done: whether its node ran for the last time, as far as the engine of autograd knew.
        node_until: last moment at which its node has what becomes the value when it is read.
        given: what a node in Python was given of it.
    """

    storage: int
    call: int
    layout: MemoryLayout
    asked: list[tuple[int, int, str]] = field(default_factory=list)
    released: int | None = None
    node_until: int = -1
    is_late: bool = False
    is_done: bool = False
    given: AskedAgain = field(default_factory=AskedAgain)


def _sizes_over_time(changes: Sequence[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Return the bytes of a storage from each moment on at which they change; 0 before the first."""
    found, size = [], 0
    for moment, (life, delta) in enumerate(changes):
        if life == number:
            size += delta
            found.append((moment + 1, size))
    return found


def _size_at(sizes: Sequence[tuple[int, int]], moment: int) -> int:
    """Return the bytes of a storage at a moment."""
    return next((size for start, size in reversed(sizes) if start <= moment), 0)


def _is_plain_forward() -> bool:
    """Say whether a forward with gradients runs that nobody packs saved tensors of."""
    return torch.is_grad_enabled() and running_node() is None and hooks_around() is None


class _AsTaped(OperatorMode):
    """Stands where a tape will: under the mode of another, attention adds its mask to a copy."""

    is_of_forward = True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`."""
        return func(*args, **kwargs)


def _packer() -> str:
    """Return the qualified name of what packs saved tensors now."""
    hooks = hooks_around()
    return "" if hooks is None else f"{hooks[0].__module__}.{hooks[0].__qualname__}"


def _copy_of(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    copy = tensor.detach().as_strided((whole,), (1,), 0).clone()
    return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

"""The plan of `ac=budget`: what is kept of each block, what is recomputed, and what that costs at least.

How an executor carries out a plan, which is what the predicted bytes count on:

1. *Operators* of a block are the ATen operators on local tensors that a dispatch mode sees during its
   forward and that make a tensor or write to one, numbered from 0. Views have no number: of one forward,
   plain tensors have others than fake ones, whose views autograd repeats. A storage belongs to the operator
   that made it; an operator that writes to a storage in place belongs to the making of it, or begins another
   *content* of it, which is a value like a storage, where others have read it before. What stands
   before the block is *outside*, and never recomputed.
2. Each time autograd saves a tensor on a storage that the block made, or on an offloaded input, it gets a
   *ticket*. Other storages outside are held as plain autograd does.
3. When forward of the block ends, the *needed* operators are those that the storages of all tickets follow
   from, back to kept, offloaded and outside storages. A needed operator runs once in backward, without
   grad; one that makes a storage of `again`, once for each request of a node that needs that storage; one of
   `drop`, once more than the storage is dropped, or as often where it is kept.
   A value *is read* by each needed operator that has not run and by each ticket that is not redeemed.
4. Held from forward on are exactly the storages that are read, and kept or outside. An offloaded one is
   copied to the host when forward of the block ends, and comes back when the first that reads it in backward
   begins. Everything else is held by nobody but the forward itself.
5. A node of autograd that redeems a ticket runs the needed operators of its value that have not run, in the
   order of forward, each with what it reads as it was then. Results that nobody reads are dropped at once. A
   value is dropped as soon as nobody reads it: kept, recomputed, fetched from the host, or outside alike.
   A storage of `again` is dropped when nobody reads it for this request, and what it is made of is read
   until the last request that needs it. So is one of `drop`, after the requests with the numbers of its
   `after` alone; a request needs it that asks for it, or runs an operator that reads it. Behind the last of
   these its operator runs once more, and it is a value as others.
   A content that forward has written over is never kept. It is made again, and the operator that writes over
   it does so in its memory where nobody reads it any more, else in a copy. Of a storage from outside, what it
   was is copied before forward writes to it, if an operator that may run again reads that.
6. A random operator is run again with the state of its generator in forward: `torch.get_rng_state()` (5,056
   bytes on the CPU) before it runs, unless all that it makes or writes to is kept or offloaded, or its
   `dropout_p` is 0. Operators from outside of torch are random where a generator has moved. The state is held
   as long as the operator may run again; while it runs again, another one holds the state to put back.
7. A block that is `plain`, or not in the plan, runs untouched.
8. Where parts of the model run in chunks, operators are those that the loops run, chunk by chunk.
9. Blocks of a *group* hold nothing of their own in forward. The first ticket of one that is redeemed runs its
   forward again as one; `planning.group_simulation` has the rules.
10. Blocks of a *chain* are one forward, whose operators are those of its blocks in order. What runs between
    two of them is outside.
11. A block that is to `rerun` has no tape: a checkpoint holds its inputs, and runs its Python code again when
    backward first asks for anything that was saved; `planning.rerun` has the rules.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from strategies.base import StrategyError
from strategies.step.sizes import PriorOperator, TensorSize
from strategies.text_files import read_text, write_text

_WORDS = {"again": "recompute for each reader", "drop": "drop in backward"}
FORMAT = "acbench budget plan 12"
_INPUT = -1
_WRITTEN = -1
_OF_VALUES = ("keep", "offload", "recompute", "again")
FATES = (*_OF_VALUES, "drop")


class Value(NamedTuple):
    """A storage that an operator of a block's forward makes or writes to, or that of an input of the block.

    Fields:
        operator: ordinal of the operator among all of the block's forward; -1 of an input.
        result: number of its tensor among the tensors that the operator returns, or that the block is called
            with, flattened. Where others have read it before the operator writes to it, below 0: -1 of the
            one that has the lowest address until then.
        name: name of the operator, `aten.addmm.default`; checked when the block runs. `input` of an input.
    """

    operator: int
    result: int
    name: str

    @property
    def is_input(self) -> bool:
        """True if it is that of an input."""
        return self.operator == _INPUT

    @property
    def is_written(self) -> bool:
        """True if the operator writes to it."""
        return self.result <= _WRITTEN

    def __str__(self) -> str:
        place = f"{self.name}{'' if self.result == _WRITTEN else f'.{self.result}'} ({self.operator})"
        return f"{self.name} {self.result}" if self.is_input else place


class Drop(NamedTuple):
    """A storage that is dropped while others still ask for it, and made again for the next.

    Fields:
        operator, result, name: as of `Value`.
        after: numbers of requests of backward that need it after which it is dropped, in order.
    """

    operator: int
    result: int
    name: str
    after: tuple[int, ...]

    @property
    def is_input(self) -> bool:
        """True if it is that of an input, which no plan drops."""
        return self.operator == _INPUT

    @property
    def value(self) -> Value:
        """The storage."""
        return Value(self.operator, self.result, self.name)

    def __str__(self) -> str:
        return f"{self.value} after {' and '.join(map(str, self.after))}"


def input_value(number: int) -> Value:
    """Return the address of an input of a block."""
    return Value(_INPUT, number, "input")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """The decisions for one block.

    Fields:
        fqn: plain FQN of the block.
        keep: storages that stay on the device until nobody reads them.
        offload: storages that wait for backward on the host; inputs of the block may be among them.
        recompute: storages that autograd saves and that are recomputed, those that nothing else names; and
            contents that a write begins and that are not kept.
        again: storages that are recomputed for each reader in backward, saved by autograd or not.
        drop: storages that are kept, or recomputed once, until so many requests of backward have needed them;
            the next makes them again.
        plain: whether the block runs untouched; then the other fields are empty.
        rerun: whether a checkpoint around the block recomputes it as a whole, Python code included.
        group: FQN of the first block of its group, all of which hold nothing but the input of that one until
            their forward runs again as one in backward, from when on they `keep`; empty of a block in none.
        chain: FQN of the first block of its chain, which one tape follows: what they hand on is made again as
            their other values are; empty of a block in none.
        modules: plain FQNs of the modules next to the blocks whose forwards, one after another, are this one,
            such as the last norm and the head; empty of a block.
        caller: FQN of the module that calls the block, of whose operators before it some belong to this
            forward, such as those of the embedding; `None` where none do.
        caller_sizes: sizes of the inputs of that module, checked when it runs.
        before: those operators, the first ones of this forward.
        operators: number of operators of its forward, checked when the block runs.
        sizes: sizes of its inputs and parameters, checked when the block runs; none of a block that is plain
            in eager.
        graph: digest of the joint graph that the plan was made for, checked when the block is compiled; empty
            for `executor="eager"`.
        saved_bytes: bytes that autograd saves of what the block makes, where it runs untouched.
        kept_bytes, offloaded_bytes: bytes that the block leaves on the device and on the host for backward.
        extra_flops: FLOPs of the operators that run again.
        why: reason for the decisions, one sentence.
    """

    fqn: str
    keep: tuple[Value, ...] = ()
    offload: tuple[Value, ...] = ()
    recompute: tuple[Value, ...] = ()
    again: tuple[Value, ...] = ()
    drop: tuple[Drop, ...] = ()
    plain: bool = False
    rerun: bool = False
    group: str = ""
    chain: str = ""
    modules: tuple[str, ...] = ()
    caller: str | None = None
    caller_sizes: tuple[TensorSize, ...] = ()
    before: tuple[PriorOperator, ...] = ()
    operators: int = 0
    sizes: tuple[TensorSize, ...] = ()
    graph: str = ""
    saved_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    extra_flops: int = 0
    why: str = ""

    def parted(self) -> tuple[BlockPlan, BlockPlan]:
        """Return the plans of the operators before the block, and of the block itself."""
        first = len(self.before)
        before: dict[str, Any] = {"fqn": f"before {self.fqn}", "modules": (self.fqn,), "sizes": ()}
        before["operators"] = first
        own: dict[str, Any] = {
            "operators": self.operators - first,
            "caller": None,
            "caller_sizes": (),
            "before": (),
        }
        for fate in FATES:
            values: tuple[Value | Drop, ...] = getattr(self, fate)
            before[fate] = tuple(each for each in values if 0 <= each.operator < first)
            own[fate] = tuple(
                each if each.is_input else each._replace(operator=each.operator - first)
                for each in values
                if each.is_input or each.operator >= first
            )
        return replace(self, **before), replace(self, **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for a model, and their certificate.

    Fields:
        budget_bytes: most bytes of a step's peak.
        spare_bytes: bytes below it that are left for what a compiler adds to the operators, as was measured.
        host_budget_bytes: most bytes that wait on the host.
        offloaded_bytes: bytes that wait on the host when backward begins, their highest total.
        minimum_feasible_bytes: smallest peak that the planner reaches.
        proven_minimum_bytes: no schedule of these operators has a smaller peak.
        step_flops: FLOPs of the step without recomputation and chunks.
        extra_flops: FLOPs of the operators that run again, in blocks and in loops.
        lower_bound_extra_flops: no schedule of these operators keeps both budgets with fewer.
        lower_bound_autograd_flops: none that runs backward as the step does, and only keeps, moves or makes
            again what backward asks for (see `planning/autograd_bound`); not below `lower_bound_extra_flops`.
        extra_s: seconds of what runs again, of tapes, and of waiting for the host, by the machine's numbers.
        objective: what is least (see `Cost`); `flops`, too, where of `both` the fewest FLOPs are best.
        executor: who carries it out: `eager`, or `compiled` by partitions of the graphs of blocks.
        model: fingerprint of what the plan was made for: names, numbers of operators, shapes.
        versions: versions that the plan was made with, by name.
        blocks: the decisions, in the order of forward.
        chunkings: ways to run the step in chunks that were planned, too; bounds and minima are of all.
        chunk: what runs in chunks, as JSON values of who chunks, with `why`, and `extra_flops` of the loops;
            `None`: nothing does.
        stages: numbers of the stages of a pipeline that it is for, all those of one rank; none of a whole
            model. Work and bytes are those of the rank's step, with every micro-batch of it.
    """

    budget_bytes: int
    spare_bytes: int = 0
    host_budget_bytes: int = 0
    predicted_peak_bytes: int
    offloaded_bytes: int = 0
    plain_peak_bytes: int
    minimum_feasible_bytes: int
    proven_minimum_bytes: int
    step_flops: int
    extra_flops: int
    lower_bound_extra_flops: int
    lower_bound_autograd_flops: int
    extra_s: float = 0.0
    objective: str = "flops"
    executor: str = "eager"
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    blocks: tuple[BlockPlan, ...]
    chunkings: int = 0
    chunk: Mapping[str, Any] | None = None
    stages: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if the budget needs nothing: every block runs untouched, and nothing in chunks."""
        return self.chunk is None and all(block.plain for block in self.blocks)

    def percent(self, flops: int) -> float:
        """Return FLOPs as percent of those of the step."""
        return 100 * flops / max(self.step_flops, 1)

    def with_idle(self, fqns: Iterable[str]) -> Plan:
        """Return the plan with those blocks left as they are that did not run in the step."""
        planned = {block.fqn for block in self.blocks}
        why = "it did not run in the step"
        idle = (BlockPlan(fqn=fqn, plain=True, why=why) for fqn in fqns if fqn not in planned)
        return replace(self, blocks=(*self.blocks, *idle))

    def of_stage(self, fqns: Collection[str]) -> Plan:
        """Return the plan with the blocks of one stage alone; itself where it is for a whole model.

        Args:
            fqns: blocks of the stage.

        Raises:
            StrategyError: the plan is for other stages.
        """
        if not self.stages:
            return self
        own = tuple(block for block in self.blocks if block.fqn in fqns)
        if not own:
            stages = " and ".join(map(str, self.stages))
            problem = f"was made for stages {stages} of a pipeline, which have none of {', '.join(fqns)}"
            raise StrategyError("ac.plan_file", f"{problem}; use the plan of this rank")
        return replace(self, blocks=own)

    def describe(self) -> str:
        """Return the certificate, and what happens to the values of each block; equal ones in a row once.

        Its milliseconds are `extra_s`: what runs again takes time, with FLOPs or without.
        """
        peak, plain = readable(self.predicted_peak_bytes), readable(self.plain_peak_bytes)
        certificate = (
            f"budget {readable(self.budget_bytes)}; predicted peak {peak}, without a plan {plain}; "
            f"{self.extra_s * 1e3:.3g} ms more and {self.percent(self.extra_flops):.2f} % extra FLOPs"
        )
        if self.spare_bytes:
            certificate += (
                f"; {readable(self.spare_bytes)} are left for what kernels need beside the operators"
            )
        if self.host_budget_bytes:
            moved, most = readable(self.offloaded_bytes), readable(self.host_budget_bytes)
            certificate += f"; {moved} of {most} wait on the host"
        if self.is_plain:
            return f"{certificate}\nthe budget needs nothing: no block keeps less than without a plan"
        if self.objective != "time":
            least = self.percent(self.lower_bound_extra_flops)
            in_order = self.percent(self.lower_bound_autograd_flops)
            what = "both budgets" if self.host_budget_bytes else "the budget"
            whose = bounded(self.chunkings)
            certificate += (
                f"; no schedule of {whose} keeps {what} with less than {least:.2f} %, and none that leaves "
                f"backward as it is with less than {in_order:.2f} %"
            )
        alike = groupby(self.blocks, lambda block: replace(block, fqn=""))
        return "\n".join(
            [
                certificate,
                *self._described_chunks(),
                *(_described([block.fqn for block in same], how) for how, same in alike),
            ]
        )

    def _described_chunks(self) -> Iterator[str]:
        if self.chunk is None:
            return
        loss = ", and the loss is part of the model" if self.chunk["with_loss"] else ""
        extra = self.percent(self.chunk["extra_flops"])
        yield f"chunks: {self.chunk['why']}; loops take {extra:.2f} % extra FLOPs{loss}"
        loops: dict[str, list[str]] = {}
        for region in self.chunk["regions"]:
            loops.setdefault(region["scope"] or "(model)", []).append(_loop_words(region))
        for _, same in groupby(loops, loops.__getitem__):
            scopes = list(same)
            yield from (f"    {_named(scopes)}: {loop}" for loop in loops[scopes[0]])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` gave.

        Raises:
            StrategyError: it is none of this version, contradicts itself, or was changed to a budget that it
                does not keep.
        """
        problem = f"holds no plan of this version, {FORMAT!r}; make it again"
        if held.get("format") != FORMAT:
            raise StrategyError("ac.plan_file", problem)
        try:
            values = {field.name: held[field.name] for field in fields(cls)}
            lists = {"blocks": tuple(map(_block, values["blocks"])), "stages": tuple(values["stages"])}
            plan = cls(**{**values, **lists})
            unsound = next(_unsound(plan), None)
        except (KeyError, TypeError, ValueError):
            raise StrategyError("ac.plan_file", problem) from None
        if unsound is not None:
            raise StrategyError("ac.plan_file", f"{unsound}; plans are not made by hand: make it again")
        if plan.predicted_peak_bytes > plan.budget_bytes:
            needed = f"was made for a peak of {plan.predicted_peak_bytes} bytes"
            raise StrategyError(
                "ac.plan_file", f"{needed}, above its budget_bytes of {plan.budget_bytes}; make it again"
            )
        return plan

    def save(self, path: Path) -> None:
        """Write the plan to `path`, over what is there."""
        write_text(path, json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Return the plan that `save` wrote.

        Raises:
            StrategyError: the file holds no plan of this version, or one that breaks its own budget.
            OSError: it cannot be read.
        """
        try:
            held = json.loads(read_text(path))
        except (ValueError, RecursionError):
            held = {}
        return cls.from_dict(held if isinstance(held, dict) else {})


def readable(nbytes: int) -> str:
    """Return bytes in words."""
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3f} MiB"


def bounded(chunkings: int) -> str:
    """Return what bounds are of, as a sentence has it behind "no schedule of".

    Args:
        chunkings: ways to run the step in chunks that were looked at.
    """
    if not chunkings:
        return "these operators"
    ways = "the one way" if chunkings == 1 else f"one of {chunkings} ways"
    return f"these operators, whole or in {ways} to chunk them,"


def _named(fqns: Sequence[str]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} to {fqns[-1]} ({len(fqns)} blocks)"


def _loop_words(region: Mapping[str, Any]) -> str:
    first, *_, last = region["operators"]
    return (
        f"{len(region['operators'])} operators, {first} to {last}, in {region['chunks']} chunks of "
        f"{region['chunk_size']} from {region['size']}"
    )


def _described(fqns: Sequence[str], block: BlockPlan) -> str:
    """Return the decisions for blocks in a row that have the same."""
    who = " and ".join(block.modules) if len(block.modules) > 1 else _named(fqns)
    before = "" if block.caller is None else f", with what {block.caller or 'the model'} does before it"
    lines = [f"{who}{before}: {block.why}"]
    for verb in FATES:
        listed = ", ".join(map(str, getattr(block, verb)))
        lines += [f"    {_WORDS.get(verb, verb)}: {listed}"] if listed else []
    return "\n".join(lines)


def _block(held: Mapping[str, Any]) -> BlockPlan:
    values: dict[str, Any] = {name: tuple(Value(*each) for each in held[name]) for name in _OF_VALUES}
    values["drop"] = tuple(
        Drop(operator, result, name, tuple(after)) for operator, result, name, after in held["drop"]
    )
    lists: dict[str, Any] = {
        "modules": tuple(held["modules"]),
        "before": tuple(PriorOperator(*each) for each in held["before"]),
    }
    sizes = {name: tuple(map(_size, held[name])) for name in ("sizes", "caller_sizes")}
    return BlockPlan(**{**held, **values, **lists, **sizes})


def _size(held: Sequence[Any]) -> TensorSize:
    name, shape, kind = held
    return TensorSize(name, tuple(shape), kind)


def _unsound(plan: Plan) -> Iterator[str]:
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.type == "int" and not _is_count(value):
            yield f"{field.name} is {value!r}, and must be a whole number from 0 up"
    if not plan.blocks:
        yield "it plans for no block"
    yield from _unsound_blocks(plan)


def _unsound_blocks(plan: Plan) -> Iterator[str]:
    fqns = {block.fqn for block in plan.blocks}
    changed = Counter(block.fqn for block in plan.blocks if block.plain is not True)
    yield from (f"it plans for {fqn!r} more than once" for fqn, count in changed.items() if count > 1)
    for block in plan.blocks:
        for what, first in (("group", block.group), ("chain", block.chain)):
            if first and first not in fqns:
                yield f"the {what} of {block.fqn!r} begins with {first!r}, which it does not plan for"
        if block.offload and not plan.host_budget_bytes:
            yield f"{block.fqn!r} offloads, and host_budget_bytes is 0"
        yield from (f"{block.fqn!r}: {problem}" for problem in _unsound_block(block))


def _unsound_block(block: BlockPlan) -> Iterator[str]:
    if not (type(block.plain) is type(block.rerun) is bool) or not _is_count(block.operators):
        yield "plain is true or false, so is rerun, and operators a whole number"
    if block.rerun and (
        block.plain or block.keep or block.offload or block.group or block.chain or block.before
    ):
        yield "it runs again as a whole, and in part"
    if (block.caller is None) != (not block.before) or not all(
        _is_count(each.skips) for each in block.before
    ):
        yield "it has operators of a caller before its own, or neither"
    fates: dict[Value, str] = {}
    for fate in _OF_VALUES:
        for value in getattr(block, fate):
            is_known = type(value.result) is int and type(value.operator) is int
            least = 0 if value.is_written else _INPUT
            if not (is_known and least <= value.operator < max(block.operators, 1)):
                yield f"{fate} names {value}, and forward has {block.operators} operators"
            if value.is_input and fate != "offload":
                yield f"{fate} names {value}, and inputs can be offloaded alone"
            if fates.setdefault(value, fate) not in {fate, "recompute"}:
                yield f"{value} is in {fates[value]} and in {fate}"
    yield from _unsound_drops(block, fates)


def _unsound_drops(block: BlockPlan, fates: Mapping[Value, str]) -> Iterator[str]:
    if block.drop and (block.plain or block.rerun or block.group or block.graph):
        yield "it drops values, and is plain, runs again as a whole, is in a group or compiled"
    often = Counter(drop.value for drop in block.drop)
    yield from (f"{value} is in drop more than once" for value, count in often.items() if count > 1)
    yield from (problem for drop in block.drop for problem in _unsound_drop(drop, block, fates))


def _unsound_drop(drop: Drop, block: BlockPlan, fates: Mapping[Value, str]) -> Iterator[str]:
    if not (_is_count(drop.operator) and drop.operator < block.operators and type(drop.result) is int):
        yield f"drop names {drop.value}, and forward has {block.operators} operators"
    if fates.get(drop.value) in {"offload", "again"}:
        yield f"{drop.value} is in {fates[drop.value]} and in drop"
    if not all(_is_count(each) and each for each in drop.after) or not drop.after:
        yield f"{drop.value} is dropped after {list(drop.after)}, and must be after requests, from 1 up"
    elif list(drop.after) != sorted(set(drop.after)):
        yield f"{drop.value} is dropped after {list(drop.after)}, which must go up"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0

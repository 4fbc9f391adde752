"""Plans in the words of what others run: a policy for torch, saves by operator, regions of torch-remat.

None of them can say all of a plan. torch's selective checkpointing saves all results of an operator and runs
the rest of a block again, torch-remat keeps whole modules, and both leave on the device what a plan offloads.
What each loses, docs/budget.md says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from strategies.base import StrategyError
from strategies.budget.operator_modules import BlockForward
from strategies.budget.plan import BlockPlan, Plan, Value

Forwards: TypeAlias = Mapping[str, BlockForward]

_POLICY = '''\
"""Saves of a plan for {budget_bytes} bytes: selective activation checkpointing, made with torch {torch}.

Call `apply(model)` before FSDP, DDP or a compiler wraps the model.
"""

from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SAVES = {saves}
"""Operators of each forward whose results are saved, by number among those that make or write tensors."""


def is_numbered(operator):
    if not hasattr(operator, "_schema"):
        return True
    makes = any(each.alias_info is None and "Tensor" in str(each.type) for each in operator._schema.returns)
    # whoever reads the result of a collective first waits for it
    return operator._schema.is_mutable or (
        makes and str(operator) != "_c10d_functional.wait_tensor.default"
    )


class Saves:
    def __init__(self, fqn):
        self.fqn, self.number = fqn, -1

    def __call__(self, context, operator, *args, **kwargs):
        if not is_numbered(operator):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.number += 1
        planned = SAVES[self.fqn].get(self.number)
        if planned not in (None, str(operator)):
            where = f"{{self.fqn}}: operator {{self.number}}"
            raise RuntimeError(f"{{where}} is {{operator}}, planned was {{planned}}")
        return CheckpointPolicy.MUST_SAVE if planned else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(fqn):
    return create_selective_checkpoint_contexts(Saves(fqn))


def apply(model):
    for fqn in SAVES:
        block = model.get_submodule(fqn)
        context_fn = partial(contexts, fqn)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)
    return model
'''


def policy_file(plan: Plan, forwards: Forwards) -> str:
    """Return a Python file that needs torch alone: its `apply(model)` saves what the plan holds.

    It says what torch cannot hold.

    Args:
        plan: the plan.
        forwards: forwards of its blocks, by FQN.

    Raises:
        StrategyError: forward is not the planned one.
    """
    lines = [f"    {remark}" for remark in _left_out(plan)]
    for block in _enclosed(plan):
        lines += _table_lines(block, _forward_of(block, forwards))
    saves = "\n".join(["{", *lines, "}"]) if lines else "{}"
    return _POLICY.format(budget_bytes=plan.budget_bytes, torch=plan.versions.get("torch"), saves=saves)


def operator_saves(plan: Plan, forwards: Forwards) -> str:
    """Return one line, `FQN::operator`, for each module and operator whose results the policy saves.

    A line ends with a remark where the module calls the operator more often than it is saved.

    Args:
        plan: the plan.
        forwards: forwards of its blocks, by FQN.

    Raises:
        StrategyError: forward is not the planned one.
    """
    lines = list(_left_out(plan))
    for block in _enclosed(plan):
        lines += _save_lines(block, _forward_of(block, forwards))
    return "\n".join(lines)


def remat_regions(plan: Plan, forwards: Forwards) -> str:
    """Return the `save_regions` of each block as YAML, with what is recomputed though the plan holds it.

    A region is a submodule whose results are held, and in which the plan recomputes nothing. Of regions
    inside one another it is the outermost.

    Args:
        plan: the plan.
        forwards: forwards of its blocks, by FQN.

    Raises:
        StrategyError: forward is not the planned one.
    """
    lines = list(_left_out(plan))
    for block in _enclosed(plan):
        forward = _forward_of(block, forwards)
        regions = list(_outermost(_regions(block, forward)))
        lost = [value for value in _held(block) if not _lies_in(forward.modules[value.operator], regions)]
        remark = ", ".join(map(str, lost))
        lines += _not_moved(block)
        lines += [f"# lost: {remark}"] if lost else []
        lines.append(f"{block.fqn}: [{', '.join(regions)}]")
    return "\n".join(lines)


def _enclosed(plan: Plan) -> Iterator[BlockPlan]:
    """Yield the plans of blocks that run in regions, without modules beside the blocks."""
    for block in plan.blocks:
        if not block.plain and not block.modules:
            yield block.parted()[1] if block.before else block


def _left_out(plan: Plan) -> Iterator[str]:
    """Yield a remark on the modules beside the blocks that the plan decides about."""
    beside = [
        name
        for block in plan.blocks
        for name in (*block.modules, *([] if block.caller is None else [f"what runs before {block.fqn}"]))
    ]
    if beside:
        yield f"# left as they are, though the plan recomputes values of them: {', '.join(beside)}"


def _held(block: BlockPlan) -> list[Value]:
    """Return what the block has made and holds; all exports hold its inputs."""
    return sorted(value for value in (*block.keep, *block.offload) if not value.is_input)


def _saved(block: BlockPlan, forward: BlockForward) -> list[int]:
    """Return the numbers of the operators whose results torch shall save.

    What is written in place later is not among them: torch would return it as it was written last. A saved
    operator does not run again, so a saved random one would leave other numbers to those that draw later:
    these are saved too, or, where one of them cannot be saved, none.
    """
    written = {operator for operator, _ in forward.written}
    numbers = {value.operator for value in _held(block)} - written
    first = min(numbers & set(forward.draws), default=len(forward.operators))
    later = {number for number in forward.draws if number >= first}
    cannot_be_saved = any(forward.draws[number] or number in written for number in later)
    return sorted(numbers - later if cannot_be_saved else numbers | later)


def _table_lines(block: BlockPlan, forward: BlockForward) -> list[str]:
    saved = _saved(block, forward)
    lost = ", ".join(map(str, (value for value in _held(block) if value.operator not in saved)))
    lines = [f'        {number}: "{forward.operators[number]}",' for number in saved]
    remarks = [*_not_moved(block), *([f"# lost: {lost}"] if lost else [])]
    return [*(f"    {remark}" for remark in remarks), f'    "{block.fqn}": {{', *lines, "    },"]


def _not_moved(block: BlockPlan) -> list[str]:
    """Return a remark on what the plan offloads."""
    return [f"# not offloaded: {', '.join(map(str, block.offload))}"] if block.offload else []


def _forward_of(block: BlockPlan, forwards: Forwards) -> BlockForward:
    """Return the forward of a block.

    Raises:
        StrategyError: it is not the planned one.
    """
    forward = forwards.get(block.fqn, BlockForward())
    names = dict(enumerate(forward.operators))
    values = (*_held(block), *block.recompute)
    changed = next((value for value in values if names.get(value.operator) != value.name), None)
    if len(names) == block.operators and changed is None:
        return forward
    problem = f"{block.fqn!r} runs {len(names)} operators, and the plan has {block.operators}"
    if changed is not None:
        found = names.get(changed.operator, "none")
        problem = f"operator {changed.operator} of {block.fqn!r} is {found}, and the plan has {changed.name}"
    raise StrategyError("show", f"{problem}; export a plan of mesh=single without autocast")


def _save_lines(block: BlockPlan, forward: BlockForward) -> Iterator[str]:
    """Yield the calls of a block whose results the plan keeps, `block.module::operator`, one line a kind."""
    calls = list(zip(forward.modules, forward.operators, strict=True))
    held = [calls[number] for number in _saved(block, forward)]
    yield from _not_moved(block)
    for module, name in dict.fromkeys(held):
        kept, all_calls = held.count((module, name)), calls.count((module, name))
        fqn = f"{block.fqn}.{module}" if module else block.fqn
        remark = f"  # {kept} of {all_calls} calls" if kept < all_calls else ""
        yield f"{fqn}::{name}{remark}"


def _regions(block: BlockPlan, forward: BlockForward) -> Iterator[str]:
    held = {(value.operator, value.result) for value in _held(block)}
    again = [forward.modules[value.operator] for value in block.recompute]
    for module, results in forward.results.items():
        if results and results <= held and not any(_lies_in(each, [module]) for each in again):
            yield module


def _outermost(modules: Iterable[str]) -> Iterator[str]:
    given = list(modules)
    return (each for each in given if not _lies_in(each.rpartition(".")[0], given))


def _lies_in(module: str, regions: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{region}.") for region in regions)

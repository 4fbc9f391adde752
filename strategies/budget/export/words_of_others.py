"""Plans in the words of what others run: rules of operators for torch alone, regions of torch-remat.

None of them can say all of a plan. A written file keeps operators that cost FLOPs and runs the rest of a
block again, torch-remat keeps whole modules, and both leave on the device what a plan offloads. What each
loses, docs/budget.md says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from textwrap import fill
from typing import TypeAlias

from strategies.base import StrategyError
from strategies.budget.export.operator_modules import BlockForward
from strategies.budget.plan import BlockPlan, Plan, Value, readable
from strategies.written.file_text import rules_file
from strategies.written.heavy_operators import HeavyOperator, recomputed_flops, rules_of

Forwards: TypeAlias = Mapping[str, BlockForward]


def plan_file(plan: Plan, forwards: Forwards) -> str:
    """Return a file for torch alone, which keeps each heavy operator that the plan does not run again.

    It says what it does otherwise than the plan.

    Args:
        forwards: forwards of its blocks, by FQN.

    Raises:
        StrategyError: forward is not the planned one.
    """
    operators: dict[str, tuple[HeavyOperator, ...]] = {}
    again: set[tuple[str, int]] = set()
    for block in _enclosed(plan):
        forward = _forward_of(block, forwards)
        operators[block.fqn] = forward.heavy_operators(block.fqn)
        again |= {(block.fqn, number) for number in _run_again(block, forward)}
    rules = rules_of(operators, lambda each: each.can_be_kept and (each.fqn, each.number) not in again)
    said = " ".join(_differences(plan, plan.percent(recomputed_flops(operators, rules))))
    title = f"A plan of ac=budget for {readable(plan.budget_bytes)} a step, as rules of operators."
    return rules_file(rules, title=title, name="apply_budget", remarks=fill(said, 105))


def _run_again(block: BlockPlan, forward: BlockForward) -> set[int]:
    held, found = {value.operator for value in _held(block)}, set[int]()
    waiting = [value.operator for value in block.recompute if not value.is_input]
    while waiting:
        number = waiting.pop()
        if number not in found and number not in held:
            found.add(number)
            waiting += forward.reads[number]
    return found


def _differences(plan: Plan, percent: float) -> Iterator[str]:
    """Yield what a file does otherwise than its plan, in sentences."""
    yield (
        f"acbench carries the plan out within {readable(plan.predicted_peak_bytes)}, at "
        f"{plan.percent(plan.extra_flops):.2f} % more FLOPs. Here a block runs again at once, at "
        f"{percent:.2f} %, so the peak is another one: ac=file ac.path=... measures it."
    )
    yield from (f"{remark.removeprefix('# ').capitalize()}." for remark in _left_out(plan))
    moved = [str(value) for block in _enclosed(plan) for value in block.offload]
    if moved:
        yield f"Not offloaded: {', '.join(moved)}."


def remat_regions(plan: Plan, forwards: Forwards) -> str:
    """Return the `save_regions` of each block as YAML, with what is recomputed though the plan holds it.

    A region is a submodule whose results are held, and in which the plan recomputes nothing. Of regions
    inside one another it is the outermost.

    Args:
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
        lines += [f"# not offloaded: {', '.join(map(str, block.offload))}"] if block.offload else []
        lines += [f"# lost: {remark}"] if lost else []
        lines.append(f"{block.fqn}: [{', '.join(regions)}]")
    return "\n".join(lines)


def _enclosed(plan: Plan) -> Iterator[BlockPlan]:
    """Yield the plans of blocks that run in regions, without modules next to the blocks."""
    for block in plan.blocks:
        if not block.plain and not block.modules:
            yield block.parted()[1] if block.before else block


def _left_out(plan: Plan) -> Iterator[str]:
    """Yield remarks on what the plan decides about and exports leave: modules next to blocks, inputs."""
    beside = [
        name
        for block in plan.blocks
        for name in (*block.modules, *([] if block.caller is None else [f"what runs before {block.fqn}"]))
    ]
    if beside:
        yield f"# left as they are, though the plan recomputes values of them: {', '.join(beside)}"
    handed = [block.fqn for block in plan.blocks if block.chain not in {"", block.fqn}]
    if handed:
        yield f"# held, though the plan may make them again: the inputs of {', '.join(handed)}"


def _held(block: BlockPlan) -> list[Value]:
    """Return what the block has made and holds; all exports hold its inputs."""
    return sorted(value for value in (*block.keep, *block.offload) if not value.is_input)


def _forward_of(block: BlockPlan, forwards: Forwards) -> BlockForward:
    """Return the forward of a block. Raises StrategyError: it is not the planned one."""
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

"""Plans of blocks, by addresses and with their reasons, of what was chosen for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from strategies.budget.plan import BlockPlan, Drop, Value
from strategies.budget.planning.block_options import Option
from strategies.budget.planning.block_program import BlockProgram, PlannedCall
from strategies.budget.planning.simulation import Effect
from strategies.step.step_graph import BlockCall


def block_plan(call: PlannedCall, option: Option) -> BlockPlan:
    """Return the plan of one block, by addresses and with its reason."""
    program, decision, effect = call.program, option.decision, option.effect

    def values(storages: Iterable[int]) -> tuple[Value, ...]:
        return tuple(program.value_of(storage) for storage in sorted(storages))

    saved_bytes = sum(program.nbytes[storage] for storage in program.saved)
    plain = BlockPlan(
        fqn=call.fqn,
        plain=True,
        operators=program.operators,
        saved_bytes=saved_bytes,
        kept_bytes=saved_bytes,
        why="nothing of it needs to run again",
    )
    if decision.is_plain:
        return plain
    if decision.is_rerun:
        return replace(
            plain,
            plain=False,
            rerun=True,
            recompute=values(list(program.saved)),
            kept_bytes=0,
            extra_flops=effect.flops,
            why=(
                f"its forward runs again as a whole, without a tape, for {len(program.saved)} saved values; "
                f"{option.left_bytes} bytes wait for backward"
            ),
        )
    saved_again = [storage for storage in program.saved if storage not in decision.resident]
    kept_bytes = sum(program.nbytes[storage] for storage in decision.keep)
    return replace(
        plain,
        plain=False,
        keep=values(list(decision.keep)),
        offload=values(list(decision.offload)),
        recompute=values({*saved_again, *program.written - decision.resident}),
        again=values(list(decision.again)),
        drop=_drops(program, decision.drops),
        kept_bytes=kept_bytes,
        offloaded_bytes=effect.host_bytes,
        extra_flops=effect.flops,
        why=(
            f"{len(set(effect.runs))} of {len(program.units)} operators run again for {len(saved_again)} of "
            f"{len(program.saved)} saved values; {option.left_bytes} bytes wait for backward"
            f"{_on_host(effect)}"
        ),
    )


def chained_plans(calls: Sequence[PlannedCall], chain: PlannedCall, option: Option) -> Iterator[BlockPlan]:
    """Yield the plans of the blocks of a chain, by addresses and with their reason.

    Args:
        calls: the calls of its blocks, and maybe others behind them.
        chain: the call that they are together.
        option: the decision about it.
    """
    program, decision, runs = chain.program, option.decision, Counter(option.effect.runs)
    first = 0
    for call in calls:
        last = first + call.program.operators
        if last > program.operators:
            return
        units = [number for number, unit in enumerate(program.units) if first <= unit.operators[0] < last]
        made = frozenset(storage for unit in units for storage in program.units[unit].makes)

        def values(storages: frozenset[int], first: int = first) -> tuple[Value, ...]:
            found = (program.values[storage] for storage in sorted(storages))
            return tuple(each._replace(operator=each.operator - first) for each in found)

        saved, again = made & program.saved, made & program.saved - decision.keep
        yield BlockPlan(
            fqn=call.fqn,
            chain=calls[0].fqn,
            operators=call.program.operators,
            keep=values(made & decision.keep),
            recompute=values(again | made & program.written - decision.keep),
            again=values(made & decision.again),
            drop=tuple(
                each._replace(operator=each.operator - first)
                for each in _drops(program, decision.drops)
                if first <= each.operator < last
            ),
            saved_bytes=sum(program.nbytes[storage] for storage in saved),
            kept_bytes=sum(program.nbytes[storage] for storage in made & decision.keep),
            extra_flops=sum(runs[unit] * program.units[unit].flops for unit in units),
            why=(
                f"in the chain of {chain.fqn}, whose blocks make again what they hand on; "
                f"{sum(unit in runs for unit in units)} of {len(units)} operators run again for {len(again)} "
                f"of {len(saved)} saved values"
            ),
        )
        first = last


def grouped_plan(
    call: PlannedCall, keep: frozenset[int], share: Effect, *, group: tuple[str, str]
) -> BlockPlan:
    """Return the plan of one block of a group, by addresses and with its reason.

    Args:
        call: the block's call.
        keep: what it keeps from the second forward on.
        share: what it adds to the group.
        group: FQNs of the first and the last block of the group.
    """
    program = call.program
    used = sorted(keep & (program.saved | {s for unit in share.runs for s in program.units[unit].reads}))
    again = program.saved - keep
    return BlockPlan(
        fqn=call.fqn,
        group=group[0],
        operators=program.operators,
        keep=tuple(map(program.value_of, used)),
        recompute=tuple(map(program.value_of, sorted(again | program.written.difference(used)))),
        saved_bytes=sum(program.nbytes[storage] for storage in program.saved),
        kept_bytes=0,
        extra_flops=share.flops,
        why=(
            f"in the group of {group[0]} to {group[1]}, {_input_of(call, share, group)}; the second forward "
            f"of the group runs {len(share.second_runs)} of {len(program.units)} operators of this block, "
            f"and its backward {len(share.runs)} for {len(again)} of {len(program.saved)} saved values"
        ),
    )


def of_call(plan: BlockPlan, call: BlockCall) -> BlockPlan:
    """Return a plan with what it needs to know of the call that it was made for."""
    return replace(
        plan,
        sizes=call.sizes,
        modules=tuple(call.modules),
        caller=call.caller,
        caller_sizes=call.caller_sizes,
        before=call.before,
    )


def _drops(program: BlockProgram, drops: frozenset[tuple[int, int]]) -> tuple[Drop, ...]:
    """Return what is dropped in backward, by address."""
    after: dict[int, tuple[int, ...]] = {}
    for storage, number in sorted(drops):
        after[storage] = (*after.get(storage, ()), number)
    return tuple(Drop(*program.value_of(storage), numbers) for storage, numbers in after.items())


def _on_host(effect: Effect) -> str:
    """Return what a block moves, for the end of a sentence."""
    if not effect.host_bytes:
        return ""
    return f", and {effect.host_bytes} on the host, for which the step waits {effect.wait_s * 1e3:.3g} ms"


def _input_of(call: PlannedCall, share: Effect, group: tuple[str, str]) -> str:
    """Return what becomes of the input of a block in a group, for the middle of a sentence."""
    if call.fqn == group[0]:
        return "which holds this input alone"
    return f"which makes this input of {share.linked_bytes} bytes again"

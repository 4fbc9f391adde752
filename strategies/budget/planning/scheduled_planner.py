"""Plans for blocks that are called several times in a step: by a model, or by a schedule of pipeline stages.

The whole step was captured; that of a rank with all micro-batches in the order of its schedule. A decision
about a block is one about all of its calls: its effect is the sum of theirs, and so the peak of a plan is
exact, for any schedule, with what is held between the two parts of a backward. A block whose calls are not
alike runs as it is.

The programme over blocks plans one call of each, and the calls that wait with it at the moment of the
schedule where the most do. It knows them in two ways, of which neither is best for all budgets:

* Each block leaves what all of its calls hold. That is the true total for the last block of a stage, and too
  little for those before.
* The others hold R bytes, for several R: the cheapest decisions whose other calls hold at most R, and of
  which one call stays within the budget less R. Of equal R states compete in coarse steps.

The peak of each choice is simulated, the programme's budget is moved until the choice just fits, and the
cheapest choice of all is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from strategies.budget.planning.block_choice import Span, Stage, cheapest, smallest_budget
from strategies.budget.planning.block_options import CallOptions, Option
from strategies.budget.planning.cost import Cost
from strategies.budget.planning.planner import Chosen, Planner, staying
from strategies.budget.planning.simulation import PLAIN, Decision, Effect, joined

_MOST_MOMENTS = 2
"""Moments of a schedule at which other calls are counted: those with the most of them."""

_SHARES = 6
"""Numbers of bytes of other calls that are tried at each moment."""

_ATTEMPTS = 12
"""Budgets of the programme that are tried where a block leaves what all of its calls hold."""


class ScheduledPlanner(Planner):
    """Plans for a step, whatever the budget: one decision for all calls of a block."""

    _breeds = False  # stages know the bytes of one call, not what others hold meanwhile

    def _made_stages(self) -> list[Stage]:
        """Return each block with the options of one of its calls."""
        by_block: dict[str, list[int]] = {}
        for number, call in enumerate(self._calls):
            by_block.setdefault(call.fqn, []).append(number)
        self._numbers = list(by_block.values())
        self._firsts = [min(numbers, key=self._window) for numbers in self._numbers]
        options: dict[object, list[Option]] = {}
        stages = []
        for start, numbers in enumerate(self._numbers):
            caller = self._callers[self._firsts[start]]
            is_plain = not self._is_alike(numbers) or not caller.call.program.asked
            if (key := (caller.call.program, is_plain)) not in options:
                options[key] = [caller.option(PLAIN)] if is_plain else caller.all()
            stages.append(Stage(options=options[key], forward_start=0, backward_start=0, between=0))
        self._moments = list(self._fullest_moments())
        return stages

    def _window(self, number: int) -> int:
        """Return how long backward of a call takes: the shorter, the less of other calls is in between."""
        return self._callers[number].backward_end - self._callers[number].backward_start

    def _fullest_moments(self) -> Iterator[int]:
        """Yield the moments between calls of which no other has as many calls of each block at hand."""
        ends = [each.start for each in self._calls] + [each.backward_start for each in self._callers]
        held = {moment: self._counts(moment) for moment in sorted(ends)}
        fullest: dict[tuple[int, ...], int] = {}
        for moment, counts in held.items():
            fullest.setdefault(counts, moment)
        best = [
            (counts, moment)
            for counts, moment in fullest.items()
            if not any(
                other != counts and all(a >= b for a, b in zip(other, counts, strict=True))
                for other in fullest
            )
        ]
        yield from (moment for _, moment in sorted(best, key=lambda each: -sum(each[0]))[:_MOST_MOMENTS])

    def _counts(self, moment: int) -> tuple[int, ...]:
        """Return how many calls of each block wait for backward at a moment, and are within theirs."""
        found: list[int] = []
        for numbers in self._numbers:
            callers = [self._callers[number] for number in numbers]
            found.append(sum(each.call.end <= moment <= each.backward_start for each in callers))
            found.append(sum(each.backward_start < moment <= each.backward_end for each in callers))
        return tuple(found)

    def _decided(self, start: int, decision: Decision) -> Chosen:
        known = self._known.get((start, decision))
        if known is None:
            option = self._callers[self._firsts[start]].option(decision)
            effects = [
                self._callers[number].option(option.decision).effect for number in self._numbers[start]
            ]
            known = Chosen(start=start, option=option, effect=joined(effects))
            self._known[start, decision] = known
        return known

    def _call_of(self, start: int) -> int:
        return self._firsts[start]

    def _within(
        self,
        budget_bytes: int,
        stages: Sequence[Stage],
        spans: Sequence[Span],
        host_bytes: int,
        enough: float = np.inf,
        *,
        cost: Cost | None = None,
    ) -> list[Chosen] | None:
        """Return the cheapest choice that keeps the budget, of those that the programme gives."""
        del spans  # which are of one call of each block, and no other call may come in between
        del host_bytes, enough  # plans of stages have nothing on the host, and all choices are tried
        found = []
        for moment in self._moments:
            beside = self._beside(stages, moment)
            found.append(self._fitting(budget_bytes, [_leaving_all(each) for each in beside], cost))
            found += [self._fitting_beside(budget_bytes, beside, others) for others in _shares(beside)]
        kept = [chosen for chosen in found if chosen is not None]
        return min(kept, key=partial(self._cost_of_choice, cost=cost), default=None)

    def _fitting(self, budget_bytes: int, stages: Sequence[Stage], cost: Cost | None) -> list[Chosen] | None:
        """Return the cheapest choice that keeps the budget, where a block leaves what all its calls hold."""
        price = partial(self._cost_of_choice, cost=cost)
        best: list[Chosen] | None = None
        fits, above = smallest_budget(stages), 2 * budget_bytes
        target = max(budget_bytes, fits)
        for _ in range(_ATTEMPTS):
            choices = cheapest(stages, target)
            chosen = None if choices is None else self._chosen(choices, stages, ())
            spare = -1 if chosen is None else budget_bytes - self._peak_bytes(chosen)
            if chosen is not None and spare >= 0:
                fits = target
                best = chosen if best is None else min(best, chosen, key=price)
            else:
                above = target
            if above - fits <= 1:
                break
            # the next one by what was missed, or the middle where that was tried
            target += spare
            target = target if fits < target < above else (fits + above) // 2
        return best

    def _fitting_beside(self, budget_bytes: int, stages: Sequence[Stage], others: int) -> list[Chosen] | None:
        """Return the cheapest choice that keeps the budget, where other calls hold at most so many bytes."""
        target = budget_bytes - others
        for _ in range(2):
            choices = cheapest(stages, target, others)
            if choices is None:
                break
            chosen = self._chosen(choices, stages, ())
            spare = budget_bytes - self._peak_bytes(chosen)
            if spare >= 0:
                return chosen
            target += spare
        return None

    def _choice_of_fewest_bytes(self) -> list[Chosen]:
        found = [self._untouched()]
        for moment in self._moments:
            beside = self._beside(self._stages, moment)
            for fewest in (_left, _at_most):  # where the peak lies outside of blocks, the programme sees none
                decisions = [min(stage.options, key=fewest).decision for stage in beside]
                found.append([self._decided(start, each) for start, each in enumerate(decisions)])
            ways = [([_leaving_all(each) for each in beside], 0)]
            for stages, others in ways + [(beside, others) for others in _shares(beside)]:
                choices = cheapest(stages, smallest_budget(stages, others), others)
                if choices is not None:
                    found.append(self._chosen(choices, stages, ()))
        return min(found, key=self._peak_bytes)

    def _beside(self, stages: Sequence[Stage], moment: int) -> list[Stage]:
        """Return the stages with what other calls of each block hold at a moment."""
        held = self._graph.held_bytes
        events = sorted(
            {each.call.start for each in self._callers} | {c.backward_start for c in self._callers}
        )
        found = []
        for start, stage in enumerate(stages):
            callers = [self._callers[number] for number in self._numbers[start]]
            waiting = [each for each in callers if each.call.end <= moment <= each.backward_start]
            parted = [each for each in callers if each.backward_start < moment <= each.backward_end]
            latest = max(waiting or callers, key=lambda each: each.call.end)
            options = [
                _beside(option, waiting=waiting, parted=parted, moment=moment) for option in stage.options
            ]
            gaps = (
                held[after : next((each for each in events if each > after), after) + 1]
                for after in (latest.call.end, latest.backward_end)
            )
            found.append(
                Stage(
                    options=options,
                    forward_start=int(held[latest.call.start]),
                    backward_start=int(held[latest.backward_start]),
                    between=max(int(gap.max(initial=0)) for gap in gaps),
                )
            )
        return found

    def _is_alike(self, numbers: Iterable[int]) -> bool:
        """Say whether a decision about one call can be one about all.

        Which inputs could wait on the host may differ: none does.
        """
        programs = {replace(self._calls[number].program, inputs=()) for number in numbers}
        sizes = {self._graph.calls[number].sizes for number in numbers}
        return len(programs) == len(sizes) == 1

    def _why_unplanned(self) -> dict[str, str]:
        by_block: dict[str, list[int]] = {}
        for number, call in enumerate(self._calls):
            by_block.setdefault(call.fqn, []).append(number)
        each = "for each micro-batch" if self.stages else "in each of their calls"
        unlike = {
            fqn: f"do not run alike {each}"
            for fqn, numbers in by_block.items()
            if not self._is_alike(numbers)
        }
        return unlike | staying(self._graph)


def _left(option: Option) -> int:
    """Return the bytes that all calls of a block leave."""
    return option.left_bytes + option.host_bytes


def _at_most(option: Option) -> int:
    """Return the most bytes of a block's backward, with those of its other calls."""
    return option.backward_bytes + option.host_bytes


def _shares(stages: Sequence[Stage]) -> list[int]:
    """Return numbers of bytes that other calls may hold, from the fewest to the most."""
    held = [[option.host_bytes for option in stage.options] for stage in stages]
    fewest, most = sum(map(min, held)), sum(map(max, held))
    return list(range(fewest, most + 1, max((most - fewest) // _SHARES, 1)))[: _SHARES + 1]


def _leaving_all(stage: Stage) -> Stage:
    """Return a stage whose options leave what all calls of the block hold."""
    options = [
        replace(
            each,
            left_bytes=each.left_bytes + each.host_bytes,
            forward_bytes=each.forward_bytes + each.host_bytes,
            backward_bytes=each.backward_bytes + each.host_bytes,
            host_bytes=0,
        )
        for each in stage.options
    ]
    return replace(stage, options=options)


def _beside(
    option: Option, *, waiting: Sequence[CallOptions], parted: Sequence[CallOptions], moment: int
) -> Option:
    """Return an option whose second resource is what the other calls of its block hold at a moment.

    Args:
        option: an option of one call.
        waiting, parted: calls that wait for backward then, and that are within it.
        moment: the moment.
    """

    def of_all(callers: Sequence[CallOptions], count: int) -> int:
        if not count:
            return 0
        effect: Effect = callers[-1].option(option.decision).effect
        return count * effect.most_bytes(moment, moment)

    # bytes of a plan on the host are another second resource, and plans of stages have none
    others = of_all(waiting, len(waiting) - 1) if waiting else 0
    return replace(option, host_bytes=max(others + of_all(parted, len(parted)), 0))

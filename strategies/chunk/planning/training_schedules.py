"""Schedules of all scopes of a model for forward and backward: one option for each call of a scope."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from strategies.chunk.loops.backward import ScopeCall, TrainingPass, saved_storages
from strategies.chunk.planning.scope_schedules import ModelSchedule, ModelScopes, ScopeKind, ScopeScheduler
from strategies.chunk.planning.training_search import PassOption, TrainingSearch, scope_options

_DOUBT = 1.05  # estimated peaks are no more than this above those of rehearsals
_STRIDES = (
    (1,),
    (1, 2, 4),
    (1, 2, 4, 8, 16),
)  # options that a step may go down at once, in each of the descents
_SHARES = 4  # a step takes identical scopes all together, or this part of them
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionChoice:
    """One option for each call of a scope.

    Fields:
        at: position of the option, by position of the call; `None` is the model itself.
        peak_bytes, seconds: estimates for the whole pass.
    """

    at: Mapping[int | None, int]
    peak_bytes: int
    seconds: float


class TrainingSchedules:
    """Schedules of one model; scopes of one kind have the same options.

    Args:
        scopes: recorded with gradients.
        rehearse: returns the peak in bytes of the whole pass under schedulers, by FQN.
        alike: schedules of the same model, whose inner scopes have the same options.

    Attributes:
        kinds: kinds of the inner scopes.
    """

    def __init__(
        self,
        scopes: ModelScopes,
        rehearse: Callable[[Mapping[str, ScopeScheduler]], int],
        alike: TrainingSchedules | None = None,
    ) -> None:
        self._scopes = scopes
        self._rehearse = rehearse
        self._alike = alike
        self._rehearsed: dict[tuple[int, ...], ModelSchedule] = {}
        self.kinds = scopes.kinds[:-1]
        self._known: dict[tuple[int, ...], OptionChoice] = {}

    def fastest(self, budget_bytes: int | None) -> tuple[ModelSchedule, int]:
        """Return the fastest schedule that a rehearsal finds within the budget, and the smallest peak seen.

        Without a budget, and where nothing fits, the schedule is the smallest one.
        """
        path, last = self.path, len(self.path) - 1
        smallest = self._at(last)
        if budget_bytes is None or smallest.peak_bytes > budget_bytes:
            found = [self._at(index) for index in range(max(last - 2, 0), last + 1)]
            smallest = min(found, key=lambda each: each.peak_bytes)
            if budget_bytes is None or smallest.peak_bytes > budget_bytes:
                return smallest, smallest.peak_bytes
        budget = budget_bytes
        guess = next((index for index, each in enumerate(path) if each.peak_bytes <= budget), last)
        first = next((index for index, each in enumerate(path) if each.peak_bytes <= budget * _DOUBT), last)
        found_at = _bisect(lambda index: index >= first and self._at(index).peak_bytes <= budget, guess, last)
        self._rehearse_longer(path[found_at], budget)
        fitting = [each for each in self._rehearsed.values() if each.peak_bytes <= budget]
        smallest = min(self._rehearsed.values(), key=lambda each: each.peak_bytes)
        return min(fitting, key=lambda each: each.slowdown), smallest.peak_bytes

    def _at(self, index: int) -> ModelSchedule:
        """Return the schedules at a position of the path, with the peak of their rehearsal."""
        return self._planned(self.path[index])

    def _rehearse_longer(self, chosen: OptionChoice, budget_bytes: int) -> None:
        """Rehearse a choice with the fastest option of the model itself that seems to keep the budget."""
        others = (self._chosen({**chosen.at, None: at}) for at in range(chosen.at[None]))
        fitting = [each for each in others if each.peak_bytes <= budget_bytes]
        faster = [each for each in fitting if each.seconds < chosen.seconds]
        if faster:
            self._planned(min(faster, key=lambda each: each.seconds))

    def _planned(self, chosen: OptionChoice) -> ModelSchedule:
        """Return the schedules of a choice, with the peak of their rehearsal."""
        key = tuple(chosen.at.values())  # always in one order
        if key not in self._rehearsed:
            whole = self.path[0]
            options = [self._options_of(call)[chosen.at[call]] for call in (*range(len(self.kinds)), None)]
            planned = ModelSchedule(
                graphs=self._scopes.graphs,
                schedules=[option.planned.schedule for option in options],
                goals=[chosen.peak_bytes] * len(options),
                recomputes=[option.recomputes for option in options],
                peak_bytes=0,
                slowdown=(chosen.seconds + self._scopes.checks_s) / whole.seconds if whole.seconds else 1.0,
                peak_share=chosen.peak_bytes / max(whole.peak_bytes, 1),
            )
            peak = self._rehearse(planned.schedulers(self._scopes.machine))
            self._rehearsed[key] = replace(planned, peak_bytes=peak)
            _LOG.info("chunks: %s bytes by the rehearsal of plan %d", f"{peak:,}", len(self._rehearsed))
        return self._rehearsed[key]

    @cached_property
    def path(self) -> list[OptionChoice]:
        """Choices of less and less memory and more and more time, the first with nothing chunked."""
        path = [self._chosen(dict.fromkeys((*range(len(self.kinds)), None), 0))]
        if self.kinds:
            found = [each for jumps in _STRIDES for each in self._descent(path[0], jumps)]
        else:
            found = [self._chosen({None: at}) for at in range(1, len(self._model_options))]
        for each in sorted(found, key=lambda each: (each.seconds, each.peak_bytes)):
            if each.peak_bytes < path[-1].peak_bytes:
                path.append(each)
        return path

    @cached_property
    def options(self) -> dict[ScopeKind, list[PassOption]]:
        """The options of inner scopes, by kind."""
        if self._alike is not None and self._alike.kinds == self.kinds:
            return self._alike.options
        found: dict[ScopeKind, list[PassOption]] = {}
        counts = Counter(self.kinds)
        for graph, kind in zip(self._scopes.graphs, self.kinds, strict=False):
            if kind not in found:
                saves = saved_storages(graph.graph)
                first = TrainingPass(schedule=self._scopes.plain[kind], saves=saves, calls={})
                found[kind] = scope_options(first, self._scopes.machine, counts[kind], kind[1])
        return found

    @cached_property
    def _model_options(self) -> list[PassOption]:
        """The options of the model itself, searched with the smallest options of its inner scopes."""
        smallest = {index: len(self.options[kind]) - 1 for index, kind in enumerate(self.kinds)}
        schedule, saves = self._scopes.plain[self._scopes.kinds[-1]], saved_storages(self._scopes.root)
        first = TrainingPass(
            schedule=schedule, saves=saves, calls=self._calls_at(smallest), starts_backward=True
        )
        return TrainingSearch(first, self._scopes.machine).path()

    @cached_property
    def _seen(self) -> dict[tuple[ScopeKind, int], ScopeCall]:
        """The options of inner scopes as the model sees them, by kind and position."""
        return {
            (kind, index): option.as_call(self._scopes.machine, kind[1])
            for kind, options in self.options.items()
            for index, option in enumerate(options)
        }

    def _descent(self, first: OptionChoice, jumps: Sequence[int]) -> Iterator[OptionChoice]:
        current = first
        while (better := self._better(current, jumps)) is not None:
            yield from (*self._between(current, better), better)
            current = better

    def _between(self, current: OptionChoice, lower: OptionChoice) -> Iterator[OptionChoice]:
        """Yield choices in which only some of the calls go down, each of less memory than the one before."""
        changed = [call for call in current.at if current.at[call] != lower.at[call]]
        for part in range(1, _SHARES):
            gone = changed[: len(changed) * part // _SHARES]
            each = self._chosen({**current.at, **{call: lower.at[call] for call in gone}})
            if lower.peak_bytes < each.peak_bytes < current.peak_bytes and each.seconds < lower.seconds:
                yield each
                current = replace(current, peak_bytes=each.peak_bytes)

    def _options_of(self, call: int | None) -> list[PassOption]:
        return self._model_options if call is None else self.options[self.kinds[call]]

    def _better(self, current: OptionChoice, jumps: Sequence[int]) -> OptionChoice | None:
        """Return the choice that frees most bytes a second among those a few options lower."""
        moves = [
            {**current.at, **self._lower(current, calls, jump)}
            for calls in self._groups(current)
            for jump in jumps
        ]
        found = [self._chosen(at) for at in moves if at != current.at]
        lower = [each for each in found if each.peak_bytes < current.peak_bytes]

        def gain(each: OptionChoice) -> float:
            return (current.peak_bytes - each.peak_bytes) / max(each.seconds - current.seconds, 1e-7)

        return max(lower, key=gain, default=None)

    def _lower(self, current: OptionChoice, calls: Iterable[int | None], jump: int) -> dict[int | None, int]:
        return {call: min(current.at[call] + jump, len(self._options_of(call)) - 1) for call in calls}

    def _groups(self, current: OptionChoice) -> Iterable[list[int | None]]:
        """Return calls whose options may change together: of each kind those that have the most memory."""
        yield [None]
        yield list(current.at)
        for kind in dict.fromkeys(self.kinds):
            alike = [call for call, each in enumerate(self.kinds) if each == kind]
            first = min(current.at[call] for call in alike)
            behind: list[int | None] = [call for call in alike if current.at[call] == first]
            yield behind
            if len(alike) >= _SHARES:
                yield behind[: len(alike) // _SHARES]

    def _calls_at(self, at: Mapping[Any, int]) -> dict[fx.Node, ScopeCall]:
        calls = zip(self._scopes.calls, self.kinds, strict=True)
        return {call: self._seen[kind, at[index]] for index, (call, kind) in enumerate(calls)}

    def _chosen(self, at: Mapping[int | None, int]) -> OptionChoice:
        """Return a choice of options with its peak and time, computed once."""
        key = tuple(at.values())  # always in one order
        if key not in self._known:
            root = replace(self._model_options[at[None]].planned, calls=self._calls_at(at))
            peak_bytes, seconds = root.profile().peak_bytes, root.seconds(self._scopes.machine)
            self._known[key] = OptionChoice(at=at, peak_bytes=peak_bytes, seconds=seconds)
        return self._known[key]


def _bisect(fits: Callable[[int], bool], guess: int, last: int) -> int:
    """Return the first position that `fits`, asked for positions around `guess`; peaks fall, nearly."""
    low, high, step = -1, last, 1  # the last position fits or is of no use
    while high - low > 1:
        at = min(max(guess, low + 1), high - 1)
        if fits(at):
            high, guess = at, at - step
        else:
            low, guess = at, at + step
        step *= 2
    return high

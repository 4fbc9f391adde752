"""Plans for forward and backward: which option of each scope is taken for how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from strategies.chunk.loops.backward import SavedFate, ScopeCall, TrainingPass, saved_storages
from strategies.chunk.loops.loop import Schedule
from strategies.chunk.planning.training_search import PassOption, TrainingSearch, scope_options
from strategies.estimate.operator_cost import Machine
from strategies.tracing.operator_graph import ScopeGraph

ScopeKind: TypeAlias = tuple[Hashable, SavedFate]
"""What scopes with the same options have in common: a signature, and what AC does with what they save."""

_STRIDES = ((1, 2, 4), (1, 2, 4, 8, 16))  # options that a step may go down at once, in each of the descents
_SHARES = 4  # a step takes identical scopes all together, or this part of them


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionChoice:
    """One option for each call of a scope.

    Fields:
        at: position of the option, by position of the call; `None` is the model itself.
        peak_bytes, seconds: of the whole pass, estimated.
    """

    at: Mapping[int | None, int]
    peak_bytes: int
    seconds: float


class TrainingSchedules:
    """Chooses options of the scopes of one model; identical scopes have the same ones to choose from.

    Args:
        graphs: of the scopes, recorded with autograd, the model's last.
        plain: their schedules without loops.
        signatures: equal for scopes that one schedule suits.
        machine: whose time is saved.

    `path` has choices of less and less memory and more and more time, the first with nothing chunked.
    """

    def __init__(
        self,
        graphs: list[ScopeGraph],
        plain: Mapping[ScopeKind, Schedule],
        signatures: list[ScopeKind],
        machine: Machine,
    ) -> None:
        self._machine = machine
        self._signatures = signatures[:-1]
        self._root = graphs[-1].graph
        self._calls = [node for node in self._root.nodes if node.op == "call_module"]
        self._known: dict[tuple[int, ...], OptionChoice] = {}
        counts = Counter(self._signatures)
        of_sort: dict[ScopeKind, list[PassOption]] = {}
        for graph, signature in zip(graphs, self._signatures, strict=False):
            if signature not in of_sort:
                first = TrainingPass(schedule=plain[signature], saves=saved_storages(graph.graph), calls={})
                of_sort[signature] = scope_options(first, machine, counts[signature], signature[1])
        self._seen = {
            (signature, index): option.as_call(machine, signature[1])
            for signature, options in of_sort.items()
            for index, option in enumerate(options)
        }
        smallest: dict[int | None, int] = {
            index: len(of_sort[signature]) - 1 for index, signature in enumerate(self._signatures)
        }
        first = TrainingPass(
            schedule=plain[signatures[-1]],
            saves=saved_storages(self._root),
            calls=self._calls_at(smallest),
        )
        self._of_sort, self._of_model = of_sort, TrainingSearch(first, machine).path()
        self.path = [self._chosen(dict.fromkeys((*range(len(self._signatures)), None), 0))]
        found = [each for jumps in _STRIDES for each in self._descent(jumps)]
        for each in sorted(found, key=lambda each: (each.seconds, each.peak_bytes)):
            if each.peak_bytes < self.path[-1].peak_bytes:
                self.path.append(each)

    def _descent(self, jumps: Sequence[int]) -> Iterator[OptionChoice]:
        current = self.path[0]
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

    def chosen_options(self, chosen: OptionChoice) -> list[PassOption]:
        """Return the options of all graphs."""
        calls: Iterable[int | None] = (*range(len(self._signatures)), None)
        return [self._options(call)[chosen.at[call]] for call in calls]

    def _options(self, call: int | None) -> list[PassOption]:
        return self._of_model if call is None else self._of_sort[self._signatures[call]]

    def _better(self, current: OptionChoice, jumps: Sequence[int]) -> OptionChoice | None:
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
        return {call: min(current.at[call] + jump, len(self._options(call)) - 1) for call in calls}

    def _groups(self, current: OptionChoice) -> Iterable[list[int | None]]:
        """Return calls whose options may be changed at once: of those that have the most memory."""
        yield [None]
        yield list(current.at)
        for signature in dict.fromkeys(self._signatures):
            alike = [call for call, each in enumerate(self._signatures) if each == signature]
            first = min(current.at[call] for call in alike)
            behind: list[int | None] = [call for call in alike if current.at[call] == first]
            yield behind
            if len(alike) >= _SHARES:
                yield behind[: len(alike) // _SHARES]

    def _calls_at(self, at: Mapping[int | None, int]) -> dict[fx.Node, ScopeCall]:
        return {
            call: self._seen[signature, at[index]]
            for index, (call, signature) in enumerate(zip(self._calls, self._signatures, strict=True))
        }

    def _chosen(self, at: Mapping[int | None, int]) -> OptionChoice:
        key = tuple(at.values())  # always in one order
        if key not in self._known:
            self._known[key] = self._simulated(at)
        return self._known[key]

    def _simulated(self, at: Mapping[int | None, int]) -> OptionChoice:
        root = replace(self._of_model[at[None]].planned, calls=self._calls_at(at))
        return OptionChoice(at=at, peak_bytes=root.profile().peak_bytes, seconds=root.seconds(self._machine))

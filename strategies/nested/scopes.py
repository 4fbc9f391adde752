"""Scopes: which module's forward holds which region.

A region of submodule calls stands in the forward of the innermost module that makes all of these calls,
so that every module outside of it is called as ever, with its hooks. Only where a region begins inside a
module and ends outside of it, that module is looked into: its calls become calls of the module around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from strategies.errors import StrategyError
from strategies.nested.nested_regions import NestedRegion, Path, every_region, filled, nest, render
from strategies.tracing.shadow import Shadow
from strategies.tracing.shape_values import with_known_values
from strategies.tracing.without_data import following

_SHOWN = 8  # names in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Paths of submodule calls.

    Fields:
        paths: paths by FQN; every name of a module used under several counts, the n-th for its n-th call.
        where: configuration path they come from, for messages.
        is_partial: calls without a label join the regions around them, rather than end them.
    """

    paths: Mapping[str, Path]
    where: str
    is_partial: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What one module's forward holds; all names are relative to that module.

    Fields:
        fqn: plain FQN of the module in its model.
        through: the modules below it that are looked into.
        paths: path of each submodule call, by name and number of calls of that submodule before; only
            of regions that stand in this forward.
        depth: length of the path of the region around this module.
    """

    fqn: str
    through: frozenset[str]
    paths: Mapping[tuple[str, int], Path]
    depth: int

    @property
    def name(self) -> str:
        """The forward, for readers."""
        return f"forward of {self.fqn!r}" if self.fqn else "forward of the model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All regions of one model.

    Fields:
        calls: FQN of every submodule call that is not looked into, in order.
        regions: regions of these calls, outermost first.
        scopes: the forwards that hold regions, outer modules first.
    """

    calls: tuple[str, ...]
    regions: tuple[NestedRegion, ...]
    scopes: tuple[Scope, ...]

    def text(self) -> str:
        """Return the calls, one a line, indented by the regions that hold them."""
        return render(self.regions, self.calls)


_Frame: TypeAlias = tuple[str, int]
"""A call of a module: its FQN and how many calls it had before."""

_Stack: TypeAlias = tuple[_Frame, ...]
"""The calls that are running, outermost first."""


class Inputs(NamedTuple):
    """What a forward was called with, tensors of a shadow."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _SubmoduleCall:
    fqn: str
    number: int
    stack: _Stack

    @property
    def frames(self) -> _Stack:
        return *self.stack, (self.fqn, self.number)


def lay_out(
    shadow: Shadow, labels: Labels, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Layout, dict[str, Inputs]]:
    """Return where the regions of `labels` stand, and the inputs of every forward that holds some, by FQN.

    Args:
        shadow: shadow of the whole model, with fake tensors.
        labels: labels by FQN.
        args, kwargs: inputs of the model, tensors of the shadow.

    Raises:
        StrategyError: a label names a submodule that forward does not call, or the regions do not nest.
    """
    aliases = _aliases(shadow, labels)
    listing = _Listing(shadow, set(aliases))
    listing.run(args, kwargs)
    calls = listing.calls
    names = tuple(call.fqn for call in calls)
    regions = nest(_paths(calls, aliases, labels), names, labels.where)
    homes, through = _settled(regions, calls, labels=aliases)
    _refuse_repeated(homes.values(), listing, labels)
    scopes = tuple(
        _scope(home, listing, [r for r in every_region(regions) if homes[r.path] == home], through)
        for home in sorted(set(homes.values()), key=len)
    )
    inputs = {home[-1][0]: listing.inputs[home[-1]] for home in homes.values()}
    return Layout(calls=names, regions=regions, scopes=scopes), inputs


class _Listing:
    """Listens to the calls of a shadow."""

    def __init__(self, shadow: Shadow, labelled: set[str]) -> None:
        self._shadow = shadow
        self._through = {
            ".".join(parts[:end])
            for parts in (fqn.split(".") for fqn in labelled)
            for end in range(1, len(parts))
        }
        self.calls: list[_SubmoduleCall] = []
        self.counts: Counter[str] = Counter()
        self.inputs: dict[_Frame, Inputs] = {}
        self.modules = {shadow.fqns[id(module)]: module for module in shadow.model.modules()}
        self._stack: list[_Frame] = []
        self._running = ""
        self._is_inside = False

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with (
            self._shadow.listening(self),
            with_known_values(),
            following(lambda: repr(self._running) if self._running else "the model"),
        ):
            self._shadow.model(*args, **kwargs)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._is_inside:
            return body(*args, **kwargs)
        fqn = self._shadow.fqns[id(module)]
        frame = fqn, self.counts[fqn]
        self.counts[fqn] += 1
        outer, self._running = self._running, fqn
        if not fqn or fqn in self._through:
            self.inputs[frame] = Inputs(args, kwargs)
            self._stack.append(frame)
            result = body(*args, **kwargs)
            self._stack.pop()
        else:
            self.calls.append(_SubmoduleCall(*frame, tuple(self._stack)))
            self._is_inside = True
            result = body(*args, **kwargs)
            self._is_inside = False
        self._running = outer
        return result

    def read(self, module: nn.Module, name: str) -> None:
        pass  # what decides a forward is asked when it is recorded


def check_names(shadow: Shadow, labels: Labels) -> None:
    """Refuse labels of what is no submodule.

    Raises:
        StrategyError: naming the first such label.
    """
    known = dict(shadow.model.named_modules(remove_duplicate=False))
    missing = next((fqn for fqn in labels.paths if not fqn or fqn not in known), None)
    if missing is not None:
        raise StrategyError(labels.where, f"{missing!r} names no submodule; submodules are: {_some(known)}")


def _aliases(shadow: Shadow, labels: Labels) -> dict[str, list[Path]]:
    """Return the paths of each module by its first FQN, in the order of all its names."""
    aliases: dict[str, list[Path]] = {}
    for name, module in shadow.model.named_modules(remove_duplicate=False):
        if name in labels.paths:
            aliases.setdefault(shadow.fqns[id(module)], []).append(labels.paths[name])
    return aliases


def _some(names: Mapping[str, Any]) -> str:
    shown = [name for name in names if name]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _paths(
    calls: Sequence[_SubmoduleCall], aliases: Mapping[str, Sequence[Path]], labels: Labels
) -> tuple[Path, ...]:
    counts = Counter(fqn for fqn, _ in {frame for call in calls for frame in call.frames})
    for fqn, paths in aliases.items():
        if not counts[fqn]:
            raise StrategyError(labels.where, f"{fqn!r} is a submodule that forward does not call")
        if len(set(paths)) > 1 and len(paths) != counts[fqn]:
            problem = f"{fqn!r} has {len(paths)} names with different labels, and {counts[fqn]} calls"
            raise StrategyError(labels.where, f"{problem}; give all its names one label")
    return filled([_path(call, aliases, labels) for call in calls])


def _path(call: _SubmoduleCall, aliases: Mapping[str, Sequence[Path]], labels: Labels) -> Path | None:
    """Return the path of a call: its own, or that of the module which makes it."""
    found: Path | None = None if labels.is_partial else ()
    holder = ""
    for fqn, number in call.frames:
        paths = aliases.get(fqn)
        if paths is None:
            continue
        path = paths[number if len(set(paths)) > 1 else 0]
        if holder and path[: len(found or ())] != found:
            problem = (
                f"{fqn!r} has the path {list(path)}, and {holder!r}, which holds it, {list(found or ())}"
            )
            raise StrategyError(labels.where, f"{problem}; the inner path must begin with the outer one")
        found, holder = path, fqn
    return found


def _home(calls: Sequence[_SubmoduleCall], path: Path, labels: Mapping[str, Sequence[Path]]) -> _Stack:
    """Return the stack of the innermost module that makes all of `calls` and is not in the region itself."""
    first, last = calls[0].stack, calls[-1].stack
    depth = next(
        (at for at, (left, right) in enumerate(zip(first, last, strict=False)) if left != right),
        min(len(first), len(last)),
    )
    while any(label[: len(path)] == path for label in labels.get(first[depth - 1][0], ())):
        depth -= 1
    return first[:depth]


def _refuse_repeated(homes: Any, listing: _Listing, labels: Labels) -> None:
    for home in homes:
        for fqn, _ in home:
            if listing.counts[fqn] > 1:
                problem = (
                    f"{fqn!r} is called {listing.counts[fqn]} times, so that labels inside it are ambiguous"
                )
                raise StrategyError(labels.where, f"{problem}; label {fqn!r} itself")


def _settled(
    regions: Sequence[NestedRegion], calls: Sequence[_SubmoduleCall], labels: Mapping[str, Sequence[Path]]
) -> tuple[dict[Path, _Stack], dict[str, frozenset[str]]]:
    """Return the home of each region, and the modules to look into by the FQN of the scope that does.

    A region whose home is looked into moves to the scope that does so, which may want more looked into.
    """
    homes = {
        region.path: _home(calls[region.start : region.stop], region.path, labels)
        for region in every_region(regions)
    }
    while True:
        through = _through(regions, calls, homes)
        moved = {path: _outside(home, through) for path, home in homes.items()}
        if moved == homes:
            return homes, through
        homes = moved


def _outside(home: _Stack, through: Mapping[str, frozenset[str]]) -> _Stack:
    for depth in range(1, len(home)):
        looked_into = through.get(home[depth - 1][0], frozenset())
        if any(fqn in looked_into for fqn, _ in home[depth:]):
            return home[:depth]
    return home


def _through(
    regions: Sequence[NestedRegion], calls: Sequence[_SubmoduleCall], homes: Mapping[Path, _Stack]
) -> dict[str, frozenset[str]]:
    spans = _spans(calls)
    found: dict[str, set[str]] = {}
    for region in every_region(regions):
        home = homes[region.path]
        for stack, (first, last) in spans.items():
            is_below = len(stack) > len(home) and stack[: len(home)] == home
            overlaps = region.start <= last and first < region.stop
            if is_below and overlaps and not (region.start <= first and last < region.stop):
                found.setdefault(home[-1][0], set()).add(stack[-1][0])
    return {scope: frozenset(fqns) for scope, fqns in found.items()}


def _spans(calls: Sequence[_SubmoduleCall]) -> dict[_Stack, tuple[int, int]]:
    """Return the first and the last call that run inside each stack of calls."""
    spans: dict[_Stack, tuple[int, int]] = {}
    for at, call in enumerate(calls):
        for depth in range(1, len(call.stack) + 1):
            stack = call.stack[:depth]
            spans[stack] = spans.get(stack, (at, at))[0], at
    return spans


def _scope(
    home: _Stack, listing: _Listing, regions: Sequence[NestedRegion], through: Mapping[str, frozenset[str]]
) -> Scope:
    """Return the scope at `home`; a call below a module that is not looked into is that module's call."""
    fqn = home[-1][0]
    looked_into = through.get(fqn, frozenset())
    module = listing.modules[fqn]
    relative = {id(each): name for name, each in module.named_modules()}
    counts: Counter[str] = Counter()
    numbers: dict[_Frame, tuple[str, int]] = {}
    paths: dict[tuple[str, int], Path] = {}
    for at, call in enumerate(listing.calls):
        if call.frames[: len(home)] != home:
            continue
        seen = next(frame for frame in call.frames[len(home) :] if frame[0] not in looked_into)
        if seen not in numbers:
            name = relative[id(listing.modules[seen[0]])]
            numbers[seen] = name, counts[name]
            counts[name] += 1
        holding = [region.path for region in regions if region.start <= at < region.stop]
        if holding:  # the inner ones come last
            paths[numbers[seen]] = holding[-1]
    return Scope(
        fqn=fqn,
        through=frozenset(relative[id(listing.modules[each])] for each in looked_into),
        paths=paths,
        depth=min(len(region.path) for region in regions) - 1,
    )

"""Tensors from outside that the calls of a region read, and how the region reads them again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as FilePath
from traceback import walk_tb
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.nested.nested_regions import Path, path_name
from strategies.nested.offloads import storage_of
from strategies.nested.tape import Slot
from strategies.regions.outside_tensors import written_to
from strategies.regions.rewind import is_lent
from strategies.regions.saved_tensors import Packed, kept, without_graph
from strategies.regions.spoilt_values import Past
from strategies.regions.versions import versions_of

Line: TypeAlias = tuple[str, int]
"""File and number of a line."""

_OWN = ("torch.", "strategies.nested.", "strategies.regions.", "functools", "contextlib")


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor from outside of a region.

    Fields:
        packed: the tensor, here or on the host.
        reader: the name of the reader, and the line that calls it, for messages.
        is_written: the region writes into it: it gets a copy.
    """

    packed: Packed
    requires_grad: bool
    region: Path
    shape: torch.Size
    reader: tuple[str, Line | None] | None
    is_written: bool

    def __call__(self) -> Tensor:
        """Return the tensor, without its graph. Raises StrategyError: it was changed in place."""
        try:
            packed = self.packed()
        except RuntimeError as error:
            name = path_name(self.region)
            problem = f"region {name} reads {self._what()}, which is later changed in place"
            remedy = f"so {name} cannot be recomputed; include that change in {name}"
            raise StrategyError("ac", f"{problem}, {remedy}") from error
        tensor = without_graph(packed).requires_grad_(self.requires_grad)
        with torch.enable_grad():
            return tensor.clone() if self.is_written else tensor  # nobody may write into a leaf

    def _what(self) -> str:
        what = f"a tensor of {list(self.shape)}"
        if self.reader is None:
            return what
        name, line = self.reader
        return f"{what} in {name!r}" + (f" ({_shown(line)})" if line else "")


def reading_of(tensor: Tensor, region: Path) -> Reading:
    """Return how a region reads a tensor that was made in a recomputation of the one around it."""
    return Reading(kept(tensor), tensor.requires_grad, region, tensor.shape, None, is_written=False)


def readings_of(values: Mapping[Slot, Tensor], region: Path) -> dict[Slot, Callable[[], Tensor]]:
    """Return the same for all inputs of a region: copies of those that it, or what follows, changes in place.

    Raises:
        StrategyError: a changed one shares its memory with another.
    """
    storages = Counter(storage_of(tensor) for tensor in values.values())
    readings: dict[Slot, Callable[[], Tensor]] = {}
    for slot, tensor in values.items():
        if slot.is_changed and storages[storage_of(tensor)] > 1:
            name = path_name(region)
            problem = f"region {name} reads two tensors of one memory, and one is changed in place"
            remedy = f"so {name} cannot be recomputed; include in {name} what makes one of the other"
            raise StrategyError("ac", f"{problem}, {remedy}")
        own = tensor.detach().clone() if slot.is_changed else tensor
        readings[slot] = replace(
            reading_of(own, region), requires_grad=tensor.requires_grad, is_written=slot.is_changed
        )
    return readings


@dataclass(frozen=True, slots=True)
class ParameterReading:
    """A parameter that forward reads itself: read again from its module, as FSDP exchanges parameters.

    Fields:
        version: identity and version of the parameter that forward read.
    """

    module: nn.Module
    name: str
    fqn: str
    version: tuple[int, int] = (0, 0)

    def __call__(self) -> Tensor:
        """Return the parameter as it is now."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    def past(self) -> list[Past]:
        """Return the parameter if it was written to since."""
        tensor, (identity, expected) = self(), self.version
        if id(tensor) != identity or versions_of((tensor,)) == [expected]:
            return []
        name = f"{self.fqn}.{self.name}" if self.fqn else self.name
        return [Past(tensor, written_to(repr(name), tensor, expected, "the model"))]


class Owners:
    """Finds the module that has a parameter."""

    def __init__(self, modules: Callable[[], Iterator[tuple[str, nn.Module]]]) -> None:
        self._modules = modules
        self._known: dict[int, ParameterReading] = {}

    def of(self, tensor: Tensor) -> ParameterReading | None:
        """Return how to read `tensor` again; `None` if it is no parameter of the model."""
        if not isinstance(tensor, nn.Parameter) and not is_lent(tensor):
            return None
        found = self._known.get(id(tensor))
        if found is None or getattr(found.module, found.name, None) is not tensor:
            self._known = {
                id(held): ParameterReading(module, name, fqn)
                for fqn, module in self._modules()
                for held_by in (vars(module), module._parameters)  # noqa: SLF001 (FSDP1 lends attributes)
                for name, held in held_by.items()
                if isinstance(held, Tensor)
            }
            found = self._known.get(id(tensor))
        return None if found is None else replace(found, version=(id(tensor), versions_of((tensor,))[0]))


def line_of_user() -> Line | None:
    """Return the line of the user's code that is running; `None` if there is none."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 (inspect reads the files of all frames)
    while frame is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """Return the user's line that raised `error`, `model.py:12`; empty if there is none."""
    frames = [
        (each.f_globals.get("__name__", ""), each.f_code.co_filename, line)
        for each, line in walk_tb(error.__traceback__)
    ]
    lines = [_shown((file, line)) for module, file, line in frames if not _is_own(module)]
    return lines[-1] if lines else ""


def _shown(line: Line) -> str:
    file, number = line
    return f"{FilePath(file).name}:{number}"


@cache
def _is_own(module: str) -> bool:
    return f"{module}.".startswith(_OWN)

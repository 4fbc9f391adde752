"""A listing of a forward with its regions: found without memory, as text that a person reads."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from keyword import iskeyword
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from strategies import generators
from strategies.nested.folding import Edge
from strategies.nested.inputs import Owners
from strategies.nested.labels import Labels, plain_modules
from strategies.nested.nest_options import Nest
from strategies.nested.nested_regions import NestedRegion, Path, filled, nest, path_name, render
from strategies.nested.noted_tensors import NotedTensors
from strategies.nested.repetition import Region
from strategies.nested.structures import put_together, taken_apart
from strategies.nested.tape import Call, Slot, read_from_outside
from strategies.nested.tape_writer import TapeWriter
from strategies.tracing.shadow import Shadow, device_of, shadowed
from strategies.tracing.shape_values import with_known_values
from strategies.tracing.without_data import following

_INDENT = "    "
_SUBSCRIPTS = {"__getitem__": ("index",), "__setitem__": ("index", "value")}
"""Calls that are written with brackets, and their operands besides the tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The listing of one forward.

    Fields:
        calls: FQN and path of every call of a module that is not looked into, in order; `None` joins.
        tape: its calls of functions and of these modules.
        inputs: names and slots of the tensors among the inputs.
        outputs: slots of the tensors among the outputs.
        parameters: parameters that forward reads itself, by FQN.
    """

    calls: Sequence[tuple[str, Path | None]]
    tape: Sequence[Call]
    inputs: Mapping[Slot, str]
    outputs: Sequence[Slot]
    parameters: Mapping[Slot, str]
    values: Mapping[Slot, Tensor]

    def text(self) -> str:
        """Return the tree of regions, and the code that the forward amounts to."""
        lines = _Text(self).function("forward", self.inputs, self.outputs, self.tape, 0)
        return f"{tree_of(self.calls)}\n\n# forward of the model\n" + "\n".join(lines)


def regions_of(calls: Sequence[tuple[str, Path | None]]) -> tuple[NestedRegion, ...]:
    """Return the regions of calls, whose labels have been checked."""
    return nest(filled([path for _, path in calls]), [fqn for fqn, _ in calls], "ac.labels")


def tree_of(calls: Sequence[tuple[str, Path | None]]) -> str:
    """Return the calls as text, one a line, indented by the regions that hold them."""
    return render(regions_of(calls), [fqn for fqn, _ in calls])


def follow(settings: Nest, model: nn.Module, sample: tuple[Any, ...]) -> Listing:
    """Return what `model` would do with its regions, which costs neither memory nor effects on it.

    Args:
        model: plain; it may have memory or not.
        sample: positional inputs.

    Raises:
        StrategyError: the regions do not fit what forward does, or it cannot be followed without data.
    """
    device = device_of(tree_leaves(sample))
    shadow = Shadow.of(model).on(device)
    inputs = shadowed(shadow, sample, device)
    assert shadow.mode is not None
    with following(lambda: "the model"), generators.restored(), shadow.mode, with_known_values():
        return _ListingWriter(settings, shadow.model, model).listing(inputs)


class _ListingWriter(TapeWriter):
    """Follows a forward on tensors without memory, as if one region stood around it."""

    def __init__(self, settings: Nest, shadow: nn.Module, model: nn.Module) -> None:
        labels = settings.labels
        around = Labels(
            paths={fqn: (0, *path) for fqn, path in labels.paths.items()},
            where=labels.where,
            is_partial=labels.is_partial,
        )
        alone = replace(
            settings, labels=around, kept=frozenset(), offload={}, preserve_rng_state=False, rewind=False
        )
        super().__init__(alone, shadow, (), floor=None if labels.is_partial else (0,))
        self._regions.model = model
        self._shadow = shadow
        self._tensors = self._listed = _ListedTensors()
        self._tape: list[Call] = []

    def listing(self, inputs: tuple[Any, ...]) -> Listing:
        """Return what the forward does with `inputs`."""
        self._regions.settle((0,))
        leaves: list[Any] = []
        taken_apart(inputs, leaves)
        names = _names(self._shadow, inputs)
        given = {
            self._tensors.read(leaf): name
            for leaf, name in zip(leaves, names, strict=True)
            if isinstance(leaf, Tensor)
        }
        with self.listening():
            result = self._shadow.forward(*inputs)
        outputs = self._slots(result)
        self._regions.settle((0,))
        self._regions.settle(())
        self.check_calls(is_whole=True)
        owners = Owners(partial(plain_modules, self._shadow))
        read = {slot: owners.of(tensor) for slot, tensor in self._listed.values.items() if slot.position < 0}
        return Listing(
            calls=self.calls,
            tape=self._tape,
            inputs=given,
            outputs=outputs,
            parameters={
                slot: _path_to(f"{each.fqn}.{each.name}".lstrip(".")) for slot, each in read.items() if each
            },
            values=self._listed.values,
        )

    def _list(self, fqn: str, path: Path | None) -> None:
        super()._list(fqn, path and path[1:])

    def _closed(self, region: Region, tape: Sequence[Call | Edge]) -> None:
        super()._closed(region, tape)
        self._tape = [each for each in tape if isinstance(each, Call)]


class _ListedTensors(NotedTensors):
    """Keeps all tensors that it meets; what is outside of the region is the model's to change."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Slot, Tensor] = {}

    def note(self, tensor: Tensor, slot: Slot) -> None:
        super().note(tensor, slot)
        self.values.setdefault(slot, tensor)

    def change(self, tensor: Tensor) -> bool:
        super().change(tensor)
        return False


class _Text:
    """Writes code, each region as a function inside the one that calls it."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._taken: set[str] = set()
        self._names = {slot: self._new(name) for slot, name in listing.inputs.items()}
        for call in listing.tape:
            for slot in call.made:
                if slot not in self._names:
                    self._names[slot] = self._new(call.name.replace(".", "_"))

    def function(
        self, name: str, inputs: Iterable[Slot], outputs: Sequence[Slot], calls: Sequence[Call], depth: int
    ) -> Iterator[str]:
        """Yield the lines of a function: `calls`, which stand in `depth` regions."""
        yield f"def {name}({', '.join(['self', *map(self._name, inputs)])}):"
        lines: list[str] = []
        position = 0
        for region, group in groupby(calls, lambda call: call.label[1:][: depth + 1]):
            inside = list(group)
            position += len(inside)
            if len(region) <= depth:
                lines += map(self._statement, inside)
                continue
            later = read_from_outside(calls[position:]) | set(outputs)
            made = [
                slot for slot in dict.fromkeys(each for call in inside for each in call.made) if slot in later
            ]
            outside = [slot for slot in read_from_outside(inside) if slot not in self._listing.parameters]
            for slot in sorted(outside, key=lambda each: each.position):
                self._name(slot)  # a constant has none before it is read
            read = sorted(outside, key=list(self._names).index)
            code = f"checkpoint_{path_name(region)}"
            inner = self.function(code, read, made, inside, depth + 1)
            yield from (f"{_INDENT}{line}" if line else "" for line in inner)
            yield ""
            arguments = ", ".join([f"self.{code}", *map(self._name, read), "use_reentrant=False"])
            lines.append(self._assigned(made, f"torch.utils.checkpoint.checkpoint({arguments})"))
        yield from (f"{_INDENT}{line}" for line in lines)
        names, comma = ", ".join(map(self._name, outputs)), "," * (len(outputs) == 1)
        yield f"{_INDENT}return {names if depth else f'({names}{comma})'}"

    def _statement(self, call: Call) -> str:
        """Return one call of the tape as a line of Python."""
        leaves = [_Name(self._name(leaf)) if type(leaf) is Slot else leaf for leaf in call.leaves]
        args, kwargs = put_together(call.structure, leaves)
        if not call.is_module and call.name in _SUBSCRIPTS and len(args) == 1 + len(_SUBSCRIPTS[call.name]):
            return self._subscript(call, args)
        named = [f"{name}={literal(value)}" for name, value in kwargs.items()]
        arguments = [*map(literal, args), *named]
        if call.is_module:
            return self._assigned(call.made, f"{_path_to(call.name)}({', '.join(arguments)})")
        return self._assigned(call.made, _expression(call, arguments))

    def _subscript(self, call: Call, args: Sequence[Any]) -> str:
        """Return what reads, or writes, the part of a tensor as its caller would write it."""
        index = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
        comma = "," * (len(index) == 1 and isinstance(args[1], tuple))
        part = f"{literal(args[0])}[{', '.join(map(_index, index))}{comma}]"
        if call.name == "__setitem__":
            return f"{part} = {literal(args[2])}"
        return self._assigned(call.made, part)

    def _assigned(self, slots: Sequence[Slot], value: str) -> str:
        names = ", ".join(self._name(slot) for slot in slots)
        kind = _kind(self._listing.values.get(slots[0])) if len(slots) == 1 else ""
        return f"{names} = {value}{kind}" if names else value

    def _name(self, slot: Slot) -> str:
        parameter = self._listing.parameters.get(slot)
        return parameter or self._names.get(slot) or self._names.setdefault(slot, self._new("tensor"))

    def _new(self, name: str) -> str:
        word = re.sub(r"\W", "_", name)
        word = word if word.isidentifier() and not iskeyword(word) else f"_{word}"
        number = next(each for each in count() if (f"{word}_{each}" if each else word) not in self._taken)
        word = f"{word}_{number}" if number else word
        self._taken.add(word)
        return word


class _Name(str):
    """A name in code."""

    __slots__ = ()


def literal(value: Any) -> str:
    """Return a value as code; what no code makes, as its words in quotes."""
    words = repr(value)
    match value:
        case _Name():
            return str(value)
        case float() if not math.isfinite(value):
            words = f'float("{value}")'
        case torch.device():
            words = f"torch.{value!r}"
        case tuple() | list() | dict():
            words = _container(value)
        case slice():
            words = f"slice({', '.join(map(literal, (value.start, value.stop, value.step)))})"
        case FunctionType() | type():
            words = _dotted(f"{value.__module__}.{value.__qualname__}") or words
    return words if _is_expression(words) else repr(words)


def _container(values: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> str:
    if isinstance(values, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(value)}" for key, value in values.items()) + "}"
    inside = ", ".join(map(literal, values))
    return f"[{inside}]" if isinstance(values, list) else f"({inside}{',' * (len(values) == 1)})"


def _index(value: Any) -> str:
    if value is Ellipsis:
        return "..."
    if not isinstance(value, slice):
        return literal(value)
    start, stop, step = (
        "" if each is None else literal(each) for each in (value.start, value.stop, value.step)
    )
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True


def _dotted(name: str) -> str:
    """Return a dotted name if code can have it, else nothing."""
    return name if all(part.isidentifier() and not iskeyword(part) for part in name.split(".")) else ""


def _expression(call: Call, arguments: Sequence[str]) -> str:
    if getattr(call.run, "__name__", "") == "__get__":
        return f"{arguments[0]}.{call.name}"
    name = resolve_name(call.run) or call.name
    is_method = name.startswith("torch.Tensor.") or not hasattr(call.run, "__module__")
    if is_method and arguments and _dotted(call.name):
        return f"{arguments[0]}.{call.name}({', '.join(arguments[1:])})"
    called = _dotted(name) or _dotted(call.name) or "function"
    return f"{called}({', '.join(arguments)})"


def _path_to(fqn: str) -> str:
    path = "self"
    for part in fqn.split(".") if fqn else []:
        if part.isdecimal():
            path = f"{path}[{int(part)}]"
        else:
            path = f"{path}.{part}" if _dotted(part) else f"getattr({path}, {part!r})"
    return path


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return ""
    return f"  # {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _names(module: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    parameters = [*inspect.signature(module.forward).parameters, *["inputs"] * len(inputs)]
    names: list[str] = []
    for name, value in zip(parameters, inputs, strict=False):
        leaves: list[Any] = []
        taken_apart(value, leaves)
        names += [name] * len(leaves)
    return names

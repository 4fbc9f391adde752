"""Flow of states through functions: in which states a torch function takes and gives tensors.

A function stands in the model's code, where nothing can be put before it; it runs on what its producers
give. `flows` says which states of all its tensors fit together, such that every rank's result is its part
of the whole result. What is not listed here takes and gives whole tensors, which is right for every
function.

A gradient is linear in the gradient that comes back to it, so any listed function passes summands on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from torch import Tensor, fx

from strategies.shard.layout import Shape
from strategies.shard.state import SUMMED, WHOLE, State, Value, sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """States that fit together.

    Fields:
        inputs: of the tensors that the function reads, in their order.
        output: of what it gives; of all parts where it gives several.
    """

    inputs: tuple[State, ...]
    output: State


DimensionMap: TypeAlias = Callable[[fx.Node, Shape], Mapping[int, int]]
"""From a call and the shape of its first input to {dimension of the input: the same one of the output}."""

_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "truediv", "radd", "rsub", "rmul", "neg", "pow", "sqrt", "rsqrt", "square"}
    | {"exp", "tanh", "sigmoid", "relu", "gelu", "silu", "elu", "mish", "leaky_relu", "softplus", "dropout"}
    | {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"}
)
_MATRIX = 2
"""Dimensions of attention that it works on as a whole: sequence and head width."""


def flows(node: fx.Node, inputs: Sequence[Value], ranks: int) -> tuple[Flow, ...]:
    """Return in which states a call may run, the one on whole tensors first.

    Args:
        node: the call, with what it gives in `meta["val"]`.
        inputs: the tensors among the arguments, in their order.
        ranks: on the mesh axis.
    """
    whole = Flow(inputs=(WHOLE,) * len(inputs), output=WHOLE)
    given = outputs_of(node)
    name = function_name(node)
    is_known = name in _ELEMENTWISE or name in _MAPS or name in (_CAT, _ATTENTION)
    if not is_known or not given or not inputs or node.meta.get("mutates"):
        return (whole,)
    summed = Flow(inputs=tuple(map(_as_summand, inputs)), output=SUMMED)
    found = [whole] if not given[0].needs_gradient else [whole, summed]
    for dim in range(len(given[0].shape)):
        if not all(value.can_be_cut(dim, ranks) for value in given):
            continue
        states = _states(node, inputs, given[0].shape, dim)
        if states is not None and _are_even(states, inputs, ranks):
            found.append(Flow(inputs=states, output=sharded(dim)))
    return tuple(found)


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers, as many as its tensors have elements on this rank."""
    name = function_name(node)
    if name == "dropout":
        return bool(argument(node, "training", 2, True)) and argument(node, "p", 1, 0.5) > 0
    return name == _ATTENTION and argument(node, "dropout_p", 4, 0.0) > 0


def attention_flops(node: fx.Node, inputs: Sequence[Value]) -> int:
    """Return the FLOPs of scores and values in one step, forward and backward; 0 for other functions.

    The whole square is counted; a causal kernel may skip half of it.
    """
    if function_name(node) != _ATTENTION:
        return 0
    query, key, value = (each.shape for each in inputs[:3])
    # backward, each of the two products has two others
    passes = 3 if any(each.needs_gradient for each in inputs) else 1
    return passes * 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def is_view(node: fx.Node) -> bool:
    """Return whether a call gives what its input holds already."""
    return function_name(node) in _VIEWS


def outputs_of(node: fx.Node) -> tuple[Value, ...]:
    """Return the tensors that a call gives: one, or the parts of a tuple."""
    given = node.meta.get("val")
    if isinstance(given, Tensor):
        return (Value.of(given),)
    if isinstance(given, tuple | list) and all(isinstance(part, Tensor) for part in given):
        return tuple(Value.of(part) for part in given)
    return ()


def function_name(node: fx.Node) -> str:
    """Return what a function is called, whether it is a method, an operator or of `torch`; else nothing."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    return str(getattr(node.target, "__name__", "")).strip("_") if node.op == "call_function" else ""


def argument(node: fx.Node, name: str, position: int, default: Any) -> Any:
    """Return an argument of a call, given by name or by position."""
    given = node.kwargs.get(name, default)
    return node.args[position] if position < len(node.args) else given


def _as_summand(value: Value) -> State:
    return SUMMED if value.needs_gradient else WHOLE


def _states(node: fx.Node, inputs: Sequence[Value], shape: Shape, dim: int) -> tuple[State, ...] | None:
    """Return the states of the inputs with which dimension `dim` of the output is sharded."""
    name = function_name(node)
    if name in _ELEMENTWISE:
        return tuple(_broadcast(value, shape, dim) for value in inputs)
    if name == _CAT:
        along = argument(node, "dim", 1, 0) % len(shape)
        return None if dim == along else (sharded(dim),) * len(inputs)
    if name == _ATTENTION:
        is_batch = dim < len(shape) - _MATRIX
        return tuple(_broadcast(value, shape, dim) for value in inputs) if is_batch else None
    sources = {target: source for source, target in _MAPS[name](node, inputs[0].shape).items()}
    return (sharded(sources[dim]),) if dim in sources and len(inputs) == 1 else None


def _broadcast(value: Value, shape: Shape, dim: int) -> State:
    """Return the state of an operand of an elementwise function whose result shards `dim`."""
    own = dim - len(shape) + len(value.shape)
    is_there = own >= 0 and not (value.shape[own] == 1 and shape[dim] > 1)
    return sharded(own) if is_there else _as_summand(value)


def _are_even(states: Sequence[State], inputs: Sequence[Value], ranks: int) -> bool:
    return all(
        state.dim is None or value.can_be_cut(state.dim, ranks)
        for state, value in zip(states, inputs, strict=True)
    )


def _transposed(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    one, other = (argument(node, f"dim{at}", at + 1, 0) % len(shape) for at in range(2))
    return {dim: other if dim == one else one if dim == other else dim for dim in range(len(shape))}


def _unsqueezed(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    at = argument(node, "dim", 1, 0) % (len(shape) + 1)
    return {dim: dim + (dim >= at) for dim in range(len(shape))}


def _split(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    along = argument(node, "dim", 2, 0) % len(shape)
    return {dim: dim for dim in range(len(shape)) if dim != along}


def _unbound(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    along = argument(node, "dim", 1, 0) % len(shape)
    return {dim: dim - (dim > along) for dim in range(len(shape)) if dim != along}


def _picked(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    """Return the dimensions that an index leaves whole; those of a part of a tuple are its own."""
    source, index = node.args
    if isinstance(source, fx.Node) and not isinstance(source.meta["val"], Tensor):
        return {dim: dim for dim in range(len(shape))}
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(entry, slice) or entry is ... for entry in entries):
        return {}
    hidden = len(shape) - sum(entry is not ... for entry in entries)
    spread = [each for entry in entries for each in ([slice(None)] * hidden if entry is ... else [entry])]
    return {dim: dim for dim in range(len(shape)) if dim >= len(spread) or spread[dim] == slice(None)}


def _viewed(node: fx.Node, shape: Shape) -> Mapping[int, int]:
    """Return the dimensions that are the outermost of those that a view joins or splits, before and after."""
    (output,) = outputs_of(node)
    return dict(_outermost(shape, output.shape)) if prod(shape) else {}


def _outermost(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Yield the outermost dimensions of the smallest groups that hold the same elements."""
    left = right = 0
    while left < len(before) and right < len(after):
        stop, end = left + 1, right + 1
        while (held := prod(before[left:stop])) != (wanted := prod(after[right:end])):
            stop, end = stop + (held < wanted), end + (held > wanted)
        yield left, right
        left, right = stop, end


_CAT = "cat"
_ATTENTION = "scaled_dot_product_attention"
_MAPS: Mapping[str, DimensionMap] = {
    "transpose": _transposed,
    "unsqueeze": _unsqueezed,
    "chunk": _split,
    "split": _split,
    "unbind": _unbound,
    "getitem": _picked,
    "view": _viewed,
    "reshape": _viewed,
    "flatten": _viewed,
    "unflatten": _viewed,
}
_VIEWS = frozenset(_MAPS)

"""Rules of functions: which dimensions of its tensors a function carries on to its result.

A rule says in which states the tensors of a call must be, so that each rank computes its own part of a result
that is sharded in one dimension. A call with an argument that its rule does not name counts as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import fx

from strategies.shard.candidates.layout import Shape, explicit_index, leading_dimensions
from strategies.shard.model.placement_state import SUMMED, WHOLE, State, TensorValue, sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """A call of a function of torch on tensors.

    Fields:
        arguments: arguments by name, as far as the rule names them.
        output: the tensor that it gives, or the first of several.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    values: Mapping[fx.Node, TensorValue]
    output: TensorValue

    @property
    def only(self) -> TensorValue | None:
        """The tensor that it reads, where it is one."""
        return next(iter(self.values.values())) if len(self.values) == 1 else None


TensorStates: TypeAlias = Iterable[tuple[fx.Node, State]]
DimensionMap: TypeAlias = Callable[[FunctionCall, Shape], Mapping[int, int]]
"""A function of a call and the shape of its only tensor; returns {dimension of it: that of the result}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRule:
    """The rule of a function.

    Fields:
        states: maps a call and a dimension of its result to the states of its tensors; `None` for unknown.
        names: names of all its parameters; empty for any.
        is_view: whether its result shares the memory of its input.
        follows_shapes: whether numbers among its arguments say no more than the shape of the result.
        is_elementwise: whether it may change its first tensor in place.
    """

    states: Callable[[FunctionCall, int], TensorStates | None]
    names: tuple[str, ...] = ()
    is_view: bool = False
    follows_shapes: bool = False
    is_elementwise: bool = False

    def call(
        self, node: fx.Node, values: Mapping[fx.Node, TensorValue], output: TensorValue
    ) -> FunctionCall | None:
        """Return the call with its arguments by name; `None` where one has no name."""
        if self.names and (len(node.args) > len(self.names) or not node.kwargs.keys() <= set(self.names)):
            return None
        arguments = {**dict(zip(self.names, node.args, strict=False)), **node.kwargs}
        return FunctionCall(node=node, arguments=arguments, values=values, output=output)


def as_summand(value: TensorValue) -> State:
    """Return the state of a whole tensor whose gradient comes back in summands, if it has one."""
    return SUMMED if value.needs_gradient else WHOLE


def _broadcast(value: TensorValue, shape: Shape, dim: int) -> State:
    """Return the state of a tensor that broadcasts to `shape`, of which `dim` is sharded."""
    own = dim - len(shape) + len(value.shape)
    is_there = own >= 0 and not (value.shape[own] == 1 and shape[dim] > 1)
    return sharded(own) if is_there else as_summand(value)


def _elementwise(call: FunctionCall, dim: int) -> TensorStates:
    return [(node, _broadcast(value, call.output.shape, dim)) for node, value in call.values.items()]


def _chosen(call: FunctionCall, dim: int) -> TensorStates | None:
    return _elementwise(call, dim) if len(call.arguments) == len(RULES["where"].names) else None


def _joined(call: FunctionCall, dim: int) -> TensorStates | None:
    shapes = {len(value.shape) for value in call.values.values()}
    along = call.arguments.get("dim", 0) % len(call.output.shape)
    if dim == along or shapes != {len(call.output.shape)}:
        return None
    return [(node, sharded(dim)) for node in call.values]


def _stacked(call: FunctionCall, dim: int) -> TensorStates | None:
    along = call.arguments.get("dim", 0) % len(call.output.shape)
    return None if dim == along else [(node, sharded(dim - (dim > along))) for node in call.values]


def _attention(call: FunctionCall, dim: int) -> TensorStates | None:
    shape = call.output.shape
    is_batch = dim < len(shape) - 2
    return _elementwise(call, dim) if is_batch else None


def _product(call: FunctionCall, dim: int) -> TensorStates | None:
    """Return in which states the factors of a matrix product must be for a result sharded in `dim`."""
    first, second = (call.arguments.get(name) for name in ("input", "other"))
    shape = call.output.shape
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    values = call.values[first], call.values[second]
    if min(len(value.shape) for value in values) < 2:  # noqa: PLR2004 (matrices)
        return None
    if dim < len(shape) - 2:
        return [(node, _broadcast(call.values[node], shape, dim)) for node in (first, second)]
    if dim == len(shape) - 2:
        return [(first, sharded(len(values[0].shape) - 2)), (second, as_summand(values[1]))]
    return [(first, as_summand(values[0])), (second, sharded(len(values[1].shape) - 1))]


def _rows(call: FunctionCall, dim: int) -> TensorStates | None:
    """Rule of what works on one row of `input` after another, with the same parameters."""
    normalized: Any = call.arguments.get("normalized_shape", (0,))
    sizes: Any = normalized.args[0] if isinstance(normalized, fx.Node) else normalized
    source, weight, bias = (call.arguments.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(source, fx.Node) or dim >= len(call.output.shape) - len(sizes):
        return None
    parameters = [node for node in (weight, bias) if isinstance(node, fx.Node)]
    return [(source, sharded(dim)), *((node, as_summand(call.values[node])) for node in parameters)]


def _mapped(dimensions: DimensionMap) -> Callable[[FunctionCall, int], TensorStates | None]:
    """Return the rule of a function that carries each dimension of its one tensor on to another place."""

    def states(call: FunctionCall, dim: int) -> TensorStates | None:
        if call.only is None:
            return None
        sources = {target: source for source, target in dimensions(call, call.only.shape).items()}
        return [(node, sharded(sources[dim])) for node in call.values] if dim in sources else None

    return states


def _transposed(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    one, other = (call.arguments[name] % len(shape) for name in ("dim0", "dim1"))
    return {dim: other if dim == one else one if dim == other else dim for dim in range(len(shape))}


def _permuted(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    given = call.arguments.get("dims", call.node.args[1:])
    dims = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return {source % len(shape): target for target, source in enumerate(dims)}


def _unsqueezed(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    at = call.arguments["dim"] % (len(shape) + 1)
    return {dim: dim + (dim >= at) for dim in range(len(shape))}


def _others(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    along = call.arguments.get("dim", 0)
    return {} if along is None else {dim: dim for dim in range(len(shape)) if dim != along % len(shape)}


def _unbound(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    along = call.arguments.get("dim", 0) % len(shape)
    return {dim: dim - (dim > along) for dim in range(len(shape)) if dim != along}


def _reduced(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    """Return where a reduction leaves each dimension that it keeps; nothing where it takes all of them."""
    given = call.arguments.get("dim")
    if given is None or given == ():
        return {}
    gone = {dim % len(shape) for dim in ((given,) if isinstance(given, int) else given)}
    left = [dim for dim in range(len(shape)) if dim not in gone]
    keeps = call.arguments.get("keepdim", False)
    return {dim: dim if keeps else target for target, dim in enumerate(left)}


def _picked(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    """Return the dimensions that an index leaves whole; those of a part of a tuple are its own."""
    source, index = call.node.args
    if isinstance(source, fx.Node) and not isinstance(source.meta["val"], torch.Tensor):
        return {dim: dim for dim in range(len(shape))}
    entries: Any = index if isinstance(index, tuple) else (index,)
    if not all(type(entry) in (int, slice, EllipsisType, type(None)) for entry in entries):
        return {}
    return dict(_kept(explicit_index(entries, len(shape))))


def _kept(entries: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield the dimensions that an index leaves whole, before and after it."""
    source = target = 0
    for entry in entries:
        if isinstance(entry, slice) and (entry.start or 0, entry.stop, entry.step or 1) == (0, None, 1):
            yield source, target
        source += entry is not None
        target += type(entry) is not int


def _viewed(call: FunctionCall, shape: Shape) -> Mapping[int, int]:
    """Return the dimensions that are the outermost of those that a view joins or splits, before and after."""
    after = call.output.shape
    return dict(leading_dimensions(shape, after)) if prod(shape) and prod(shape) == prod(after) else {}


def _shaped_as(call: FunctionCall, dim: int) -> TensorStates | None:
    first, *others = call.values
    found = {target: source for source, target in _viewed(call, call.values[first].shape).items()}
    if dim not in found:
        return None
    return [(first, sharded(found[dim])), *((node, sharded(dim)) for node in others)]


_ELEMENTWISE = (
    "add", "sub", "mul", "div", "truediv", "radd", "rsub", "rmul", "rtruediv", "rdiv", "iadd", "isub", "imul",
    "itruediv", "neg", "pow", "rpow", "abs", "square", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh",
    "sigmoid", "erf", "relu", "relu6", "gelu", "silu", "elu", "mish", "leaky_relu", "softplus", "hardtanh",
    "clamp", "maximum", "minimum", "dropout", "masked_fill", "gt", "lt", "ge", "le", "eq", "ne", "float",
    "half", "bfloat16", "double", "contiguous", "clone", "zeros_like", "ones_like",
)  # fmt: skip
ATTENTION = "scaled_dot_product_attention"
_REDUCTIONS = ("mean", "sum", "amax", "amin")
_NORMALISATIONS = ("softmax", "log_softmax")

RULES: Mapping[str, CallRule] = {
    **dict.fromkeys(_ELEMENTWISE, CallRule(states=_elementwise, is_elementwise=True)),
    **dict.fromkeys(("to", "type_as"), CallRule(states=_elementwise)),
    "where": CallRule(states=_chosen, names=("condition", "input", "other")),
    "cat": CallRule(states=_joined, names=("tensors", "dim")),
    "stack": CallRule(states=_stacked, names=("tensors", "dim")),
    ATTENTION: CallRule(
        states=_attention,
        names=("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "matmul": CallRule(states=_product, names=("input", "other")),
    "bmm": CallRule(states=_product, names=("input", "other")),
    "linear": CallRule(states=_rows, names=("input", "weight", "bias")),
    "layer_norm": CallRule(states=_rows, names=("input", "normalized_shape", "weight", "bias", "eps")),
    "rms_norm": CallRule(states=_rows, names=("input", "normalized_shape", "weight", "eps")),
    "transpose": CallRule(states=_mapped(_transposed), names=("input", "dim0", "dim1"), is_view=True),
    "permute": CallRule(states=_mapped(_permuted), is_view=True),
    "unsqueeze": CallRule(states=_mapped(_unsqueezed), names=("input", "dim"), is_view=True),
    "chunk": CallRule(states=_mapped(_others), names=("input", "chunks", "dim"), is_view=True),
    "split": CallRule(
        states=_mapped(_others), names=("tensor", "split_size_or_sections", "dim", "split_size"), is_view=True
    ),
    "unbind": CallRule(states=_mapped(_unbound), names=("input", "dim"), is_view=True),
    "detach": CallRule(states=_elementwise, is_view=True),
    "getitem": CallRule(states=_mapped(_picked), is_view=True),
    "expand": CallRule(states=_elementwise, is_view=True, follows_shapes=True),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten"),
        CallRule(states=_mapped(_viewed), is_view=True, follows_shapes=True),
    ),
    **dict.fromkeys(
        ("view_as", "reshape_as"), CallRule(states=_shaped_as, names=("input", "other"), is_view=True)
    ),
    **dict.fromkeys(
        _REDUCTIONS, CallRule(states=_mapped(_reduced), names=("input", "dim", "keepdim", "dtype"))
    ),
    **dict.fromkeys(
        _NORMALISATIONS, CallRule(states=_mapped(_others), names=("input", "dim", "_stacklevel", "dtype"))
    ),
}
"""Rules by the name of the function, whether it is a method, an operator or of `torch`."""

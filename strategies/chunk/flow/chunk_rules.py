"""Dimension flow: which dimensions of an operator's inputs make a chunk of its output.

A chunk rule names a dimension of the outputs and dimensions of some inputs: chunks of these inputs, with all
other inputs whole, give a chunk of the outputs. In terms of sharding it says "`Shard` in, `Shard` out,
nothing to reduce" for one axis. Operators without a rule are never chunked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from strategies.chunk.flow.axes import Axis, through_view

_aten = torch.ops.aten


class ChunkRule(NamedTuple):
    """One way to chunk an operator.

    Fields:
        outs: dimension of each output; `None` for an output that cannot be used, `SUM` for partial sums.
        ins: dimension of each tensor input; `None` for an input that is needed whole.
    """

    outs: tuple[int | None, ...]
    ins: tuple[int | None, ...]


SUM = -1
"""Stands for an output's dimension where the output is the sum over chunks."""

VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,  # noqa: SLF001 (the operator's name)
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
    }
)
FACTORIES = frozenset(
    {_aten.full.default, _aten.empty.memory_format, _aten.zeros.default, _aten.ones.default}
)
SHAPED = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,  # noqa: SLF001 (the operator's name)
        _aten.reshape.default,
        _aten.expand.default,
    }
)
"""Operators that take the shape of their output as their second argument; `FACTORIES` as their first."""


def slots(node: fx.Node) -> list[fx.Node]:
    """Return the tensor inputs of a node in the order of its arguments, repetitions included."""
    if "slots" not in node.meta:
        found: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), found.append)
        node.meta["slots"] = found
    known: list[fx.Node] = node.meta["slots"]
    return known


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node that is one tensor."""
    return tuple(node.meta["val"].shape)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, which it must do in its place and whole."""
    if "random" not in node.meta:
        tags = getattr(node.target, "tags", ())
        is_seeded = torch.Tag.nondeterministic_seeded in tags
        # attention has the tag for its dropout
        node.meta["random"] = is_seeded and bool(_given(node).get("dropout_p", True))
    return bool(node.meta["random"])


def _given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by name, defaults included."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]  # noqa: SLF001 (no public name)
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    names = [each.name for each in arguments]
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the output depends on the same element of each input, after broadcasting."""
    target = node.target
    return target in _POINTWISE or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags  # noqa: SLF001
    )


def rules_of(node: fx.Node) -> Sequence[ChunkRule]:
    """Return the ways to chunk a node, views and `getitem` left out; none for an operator without a rule."""
    if "chunk_rules" not in node.meta:
        node.meta["chunk_rules"] = _rules_for(node)
    found: Sequence[ChunkRule] = node.meta["chunk_rules"]
    return found


def inputs_for(
    node: fx.Node, index: int, axis: Axis
) -> tuple[tuple[Axis | None, ...], tuple[Any, ...]] | None:
    """Return the axes of the inputs that give a chunk of output `index`, and those of all outputs.

    `None` where no chunk of the inputs gives a chunk of the output along `axis`.
    """
    known = node.meta.setdefault("inputs_for", {})
    if (index, axis) not in known:
        known[index, axis] = _inputs_for(node, index, axis)
    found: tuple[tuple[Axis | None, ...], tuple[Any, ...]] | None = known[index, axis]
    return found


def _inputs_for(
    node: fx.Node, index: int, axis: Axis
) -> tuple[tuple[Axis | None, ...], tuple[Any, ...]] | None:
    if node.target in VIEWS:
        source = through_view(shape_of(node), shape_of(slots(node)[0]), axis)
        return None if source is None else ((source,), (axis,))
    for way in rules_of(node):
        if index < len(way.outs) and way.outs[index] == axis.dim:
            return _with(way, axis)
    return None


def output_for(node: fx.Node, slot: int, axis: Axis) -> list[Axis]:
    """Return the axes that the first output can have where input `slot` is chunked along `axis`."""
    known = node.meta.setdefault("output_for", {})
    if (slot, axis) not in known:
        known[slot, axis] = _output_for(node, slot, axis)
    found: list[Axis] = known[slot, axis]
    return found


def _output_for(node: fx.Node, slot: int, axis: Axis) -> list[Axis]:
    if node.target in VIEWS:
        target = through_view(shape_of(slots(node)[0]), shape_of(node), axis)
        return [] if target is None else [target]
    return [
        axis.at(way.outs[0])
        for way in rules_of(node)
        if way.ins[slot] == axis.dim and way.outs[0] is not None and way.outs[0] != SUM
    ]


def sums(node: fx.Node) -> list[tuple[tuple[Axis | None, ...], int]]:
    """Return the axes of the inputs for each way in which the output is a sum over chunks, and their size."""
    found = []
    for way in rules_of(node):
        if way.outs != (SUM,):
            continue
        given = zip(slots(node), way.ins, strict=True)
        size = next(shape_of(source)[dim] for source, dim in given if dim is not None)
        found.append((tuple(None if dim is None else Axis(dim, 1, size) for dim in way.ins), size))
    return found


def _with(way: ChunkRule, axis: Axis) -> tuple[tuple[Axis | None, ...], tuple[Any, ...]]:
    ins = tuple(None if dim is None else axis.at(dim) for dim in way.ins)
    return ins, tuple(None if dim in {None, SUM} else axis.at(dim) for dim in way.outs)


def _rules_for(node: fx.Node) -> list[ChunkRule]:
    inputs = slots(node)
    if not _may_have_rules(node) or not all(isinstance(each.meta.get("val"), Tensor) for each in inputs):
        return []
    value = node.meta["val"]
    if isinstance(value, Tensor) and is_pointwise(node):
        return _pointwise(value.dim(), [shape_of(each) for each in inputs], tuple(value.shape))
    if node.target in FACTORIES:
        return [ChunkRule((dim,), ()) for dim in range(value.dim())]
    rule = _RULES.get(node.target)
    return rule(node, inputs) if rule is not None else []


def _may_have_rules(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and not is_random(node)


def _pointwise(rank: int, shapes: Sequence[tuple[int, ...]], target: tuple[int, ...]) -> list[ChunkRule]:
    found = []
    for dim in range(rank):
        offsets = [dim - (rank - len(shape)) for shape in shapes]
        ins = tuple(
            at if at >= 0 and shape[at] == target[dim] and target[dim] > 1 else None
            for at, shape in zip(offsets, shapes, strict=True)
        )
        found.append(ChunkRule((dim,), ins))
    return found


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _mm(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:  # noqa: ARG001 (rules have one signature)
    return [ChunkRule((0,), (0, None)), ChunkRule((1,), (None, 1)), ChunkRule((SUM,), (1, 0))]


def _addmm(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    bias = shape_of(inputs[0])
    rows = 0 if len(bias) == 2 and bias[0] > 1 else None  # noqa: PLR2004 (a matrix)
    columns = len(bias) - 1 if bias and bias[-1] > 1 else None
    return [ChunkRule((0,), (rows, 0, None)), ChunkRule((1,), (columns, None, 1))]


def _bmm(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:  # noqa: ARG001
    return [
        ChunkRule((0,), (0, 0)),
        ChunkRule((1,), (1, None)),
        ChunkRule((2,), (None, 2)),
        ChunkRule((SUM,), (2, 1)),
    ]


def _baddbmm(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    bias = shape_of(inputs[0])

    def of_bias(dim: int) -> int | None:
        at = dim - (3 - len(bias))
        return at if at >= 0 and bias[at] > 1 else None

    return [
        ChunkRule((0,), (of_bias(0), 0, 0)),
        ChunkRule((1,), (of_bias(1), 1, None)),
        ChunkRule((2,), (of_bias(2), None, 2)),
    ]


def _permute(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    rank = len(shape_of(inputs[0]))
    order = list(range(rank))
    if node.target is _aten.permute.default:
        order = [dim % rank for dim in _argument(node, 1, "dims", ())]
    elif rank > 1:
        first = 0 if node.target is _aten.t.default else _argument(node, 1, "dim0", 0) % rank
        second = 1 if node.target is _aten.t.default else _argument(node, 2, "dim1", 1) % rank
        order[first], order[second] = order[second], order[first]
    return [ChunkRule((dim,), (source,)) for dim, source in enumerate(order)]


def _expand(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    return _pointwise(len(shape_of(node)), [shape_of(inputs[0])], shape_of(node))


def _along(position: int, default: int = 0, name: str = "dim") -> Callable[..., list[ChunkRule]]:
    """Return the rule of operators that work along one dimension and keep the number of dimensions."""

    def rule(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
        rank = len(shape_of(inputs[0]))
        dim = _argument(node, position, name, default) % rank if rank else 0
        count = len(node.meta["val"]) if isinstance(node.meta["val"], tuple | list) else 1
        return [ChunkRule((each,) * count, (each,) * len(inputs)) for each in range(rank) if each != dim]

    return rule


def _select(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    rank = len(shape_of(inputs[0]))
    dim = _argument(node, 1, "dim", 0) % rank
    count = len(node.meta["val"]) if node.target is _aten.unbind.int else 1
    kept = [each for each in range(rank) if each != dim]
    return [ChunkRule((out,) * count, (source,)) for out, source in enumerate(kept)]


def _stack(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    rank = len(shape_of(node))
    dim = _argument(node, 1, "dim", 0) % rank
    return [ChunkRule((each,), (each - (each > dim),) * len(inputs)) for each in range(rank) if each != dim]


def _reduce(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    rank = len(shape_of(inputs[0]))
    reduced = _reduced_dims(node, rank)
    values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else (node.meta["val"],)
    keeps = values[0].dim() == rank
    kept = [dim for dim in range(rank) if dim not in reduced]
    found = [ChunkRule(((dim if keeps else index),) * len(values), (dim,)) for index, dim in enumerate(kept)]
    if node.target in {_aten.sum.dim_IntList, _aten.sum.default}:
        found += [ChunkRule((SUM,), (dim,)) for dim in sorted(reduced)]
    return found


def _reduced_dims(node: fx.Node, rank: int) -> set[int]:
    dims = _argument(node, 1, "dim", None)
    if isinstance(dims, int):
        dims = [dims]
    return {dim % rank for dim in dims} if dims and rank else set(range(rank))


def _layer_norm(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    free = len(shape_of(inputs[0])) - len(node.args[1])  # type: ignore[arg-type]
    count = len(node.meta["val"])
    others = (None,) * (len(inputs) - 1)
    return [ChunkRule((dim,) * count, (dim, *others)) for dim in range(free)]


def _batch_only(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    count = len(node.meta["val"]) if isinstance(node.meta["val"], tuple | list) else 1
    return [ChunkRule((0,) * count, (0,) + (None,) * (len(inputs) - 1))]


def _planes(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    """Pooling and resampling: images and channels do not meet."""
    count = len(node.meta["val"]) if isinstance(node.meta["val"], tuple | list) else 1
    spatial = 3 if "3d" in str(node.target) else 1 if "1d" in str(node.target) else 2
    free = len(shape_of(inputs[0])) - spatial
    return [ChunkRule((dim,) * count, (dim,) * len(inputs)) for dim in range(free)]


def _convolution(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:  # noqa: ARG001
    _, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
    with_bias = isinstance(bias, fx.Node)
    found = [ChunkRule((0,), (0,) + (None,) * (1 + with_bias))]
    kernel = shape_of(weight)[2:]  # type: ignore[arg-type]
    for dim, size in enumerate(kernel):
        alone = size == 1 and stride[dim % len(stride)] == 1 and padding[dim % len(padding)] == 0  # type: ignore[arg-type, index]
        if alone and dilation[dim % len(dilation)] == 1 and not is_transposed:  # type: ignore[arg-type, index]
            found.append(ChunkRule((2 + dim,), (2 + dim, *(None,) * (1 + with_bias))))
    if groups == 1 and not is_transposed:
        found.append(ChunkRule((1,), (None, 0, 0)[: 2 + with_bias]))
    return found


def _embedding(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    return [ChunkRule((dim,), (None, dim)) for dim in range(len(shape_of(inputs[1])))]


def _attention(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    """Fused attention of (B, H, S, K): batches and heads do not meet, nor do queries without causality."""
    query, key = shape_of(inputs[0]), shape_of(inputs[1])
    given = _given(node)
    if given.get("dropout_p", 0.0):
        return []
    bias = _attention_bias(given)
    count = sum(isinstance(each, Tensor) and each.dim() >= 3 for each in node.meta["val"])  # noqa: PLR2004
    outs = [(dim,) * count + (None,) * (len(node.meta["val"]) - count) for dim in range(3)]
    ins: list[tuple[int | None, ...]] = [(0, 0, 0)]
    if query[1] == key[1]:
        ins.append((1, 1, 1))
    if not given.get("is_causal", False):
        ins.append((2, None, None))
    return [
        ChunkRule(outs[each[0] or 0], (*each, *_of_bias(bias, each[0] or 0))[: len(inputs)]) for each in ins
    ]


def _attention_bias(given: Mapping[str, Any]) -> Any:
    return next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)


def _of_bias(bias: Any, dim: int) -> tuple[int | None, ...]:
    if not isinstance(bias, fx.Node):
        return ()
    shape = shape_of(bias)
    at = dim - (4 - len(shape))
    return (at if at >= 0 and shape[at] > 1 else None,)


def _nll_loss(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    return [ChunkRule((0, None), (0, 0))] if node.args[3] == 0 and len(inputs) == 2 else []  # noqa: PLR2004


def _gather(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    shape, index = shape_of(inputs[0]), shape_of(inputs[1])
    dim = node.args[1] % len(shape) if shape else 0  # type: ignore[operator]
    same = [each for each in range(len(shape)) if each != dim and shape[each] == index[each]]
    return [ChunkRule((each,), (each, each)) for each in same]


def _matrices(_: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    return [ChunkRule((dim,), (dim,)) for dim in range(len(shape_of(inputs[0])) - 2)]


def _running_norm(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    """Batch norm with running statistics; with statistics of the batch it is not chunked."""
    if _argument(node, 5, "training", default=True):
        return []
    others = (None,) * (len(inputs) - 1)
    dims = [dim for dim in range(len(shape_of(inputs[0]))) if dim != 1]
    return [ChunkRule((dim, None, None), (dim, *others)) for dim in dims]


def _pad(node: fx.Node, inputs: Sequence[fx.Node]) -> list[ChunkRule]:
    rank = len(shape_of(inputs[0]))
    return [ChunkRule((dim,), (dim,)) for dim in range(rank - len(node.args[1]) // 2)]  # type: ignore[arg-type]


_POINTWISE = frozenset(
    {
        _aten.clone.default,
        _aten.contiguous.default,
        _aten._to_copy.default,  # noqa: SLF001
        _aten.where.self,
        _aten.masked_fill.Scalar,
        _aten.masked_fill.Tensor,
        _aten.rsqrt.default,
        _aten.detach.default,
    }
)
_RULES: dict[Any, Callable[[fx.Node, Sequence[fx.Node]], list[ChunkRule]]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.permute.default: _permute,
    _aten.transpose.int: _permute,
    _aten.t.default: _permute,
    _aten.expand.default: _expand,
    _aten._softmax.default: _along(1),  # noqa: SLF001
    _aten._log_softmax.default: _along(1),  # noqa: SLF001
    _aten._safe_softmax.default: _along(1),  # noqa: SLF001
    _aten.slice.Tensor: _along(1),
    _aten.cat.default: _along(1),
    _aten.split.Tensor: _along(2),
    _aten.split_with_sizes.default: _along(2),
    _aten.cumsum.default: _along(1),
    _aten.sort.default: _along(1, -1),
    _aten.topk.default: _along(2, -1),
    _aten.select.int: _select,
    _aten.unbind.int: _select,
    _aten.stack.default: _stack,
    _aten.sum.dim_IntList: _reduce,
    _aten.sum.default: _reduce,
    _aten.mean.dim: _reduce,
    _aten.amax.default: _reduce,
    _aten.amin.default: _reduce,
    _aten.logsumexp.default: _reduce,
    _aten.var.correction: _reduce,
    _aten.var_mean.correction: _reduce,
    _aten.argmax.default: _reduce,
    _aten.linalg_vector_norm.default: lambda node, inputs: [],  # noqa: ARG005 (its dimensions are the third)
    _aten.native_layer_norm.default: _layer_norm,
    _aten._fused_rms_norm.default: _layer_norm,  # noqa: SLF001
    _aten.native_group_norm.default: _batch_only,
    _aten.native_batch_norm.default: _running_norm,
    _aten.convolution.default: _convolution,
    _aten.embedding.default: _embedding,
    _aten.gather.default: _gather,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.tril.default: _matrices,
    _aten.triu.default: _matrices,
    _aten.constant_pad_nd.default: _pad,
    _aten.upsample_nearest2d.default: _planes,
    _aten.upsample_bilinear2d.default: _planes,
    _aten.avg_pool2d.default: _planes,
    _aten.max_pool2d_with_indices.default: _planes,
    _aten._adaptive_avg_pool2d.default: _planes,  # noqa: SLF001
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,  # noqa: SLF001
    _aten._scaled_dot_product_flash_attention.default: _attention,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention.default: _attention,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention.default: _attention,  # noqa: SLF001
}

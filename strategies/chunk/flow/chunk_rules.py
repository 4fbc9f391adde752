"""Dimension flow: which dimensions of an operator's inputs make a chunk of its output.

A chunk rule names a dimension of the outputs and dimensions of some inputs: chunks of these inputs, with all
other inputs whole, give a chunk of the outputs. In terms of sharding it says "`Shard` in, `Shard` out,
nothing to reduce" for one axis. Operators without a rule are never chunked.

An operator that has a rule for each of some neighbouring dimensions computes each of their positions alone
and in the same way, so that the dimensions can be chunked as if they were one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from strategies.chunk.flow.axes import Axis, through_slice, through_view
from strategies.chunk.flow.chunk_region import Axes
from strategies.chunk.flow.row_window import ROWS, RowWindow
from strategies.estimate.operator_cost import cost_of, is_view, remembered
from strategies.tracing.channel_norms import norm_applied, norm_scales, norm_sums

_aten = torch.ops.aten
_Shape: TypeAlias = tuple[int, ...]


class ChunkRule(NamedTuple):
    """One way to chunk an operator.

    Fields:
        outs: dimension of each output; `None` for an output that cannot be used, `SUM` for partial sums.
        ins: dimension of each tensor input; `None` for an input that is needed whole.
    """

    outs: tuple[int | None, ...]
    ins: tuple[int | None, ...]


_WITHOUT_BIAS = 2  # inputs of a convolution
SUM = -1
"""Stands for an output's dimension where the output is the sum over chunks."""

_RESHAPES = frozenset(
    {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}  # noqa: SLF001 (the operator's name)
)
VIEWS = _RESHAPES | {_aten.unsqueeze.default}
FACTORIES = frozenset(
    {_aten.full.default, _aten.empty.memory_format, _aten.zeros.default, _aten.ones.default}
)
SHAPED = _RESHAPES | {_aten.expand.default}
"""Operators that take the shape of their output as their second argument; `FACTORIES` as their first."""


@remembered
def slots(node: fx.Node) -> list[fx.Node]:
    """Return the tensor inputs of a node in the order of its arguments, repetitions included."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node that is one tensor."""
    return tuple(node.meta["val"].shape)


@remembered
def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, which it must do in its place and whole; modules may."""
    if node.op == "call_module":
        return True
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_seeded and bool(_given(node).get("dropout_p", True))  # attention has the tag for its dropout


def _given(node: fx.Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]  # noqa: SLF001 (no public name)
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    names = [each.name for each in arguments]
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


@remembered
def statistics_of(node: fx.Node) -> Sequence[fx.Node]:
    """Return the running statistics that a norm of the batch writes to; its results do not depend on them."""
    if node.target is not _aten.native_batch_norm.default or not _given(node)["training"]:
        return ()
    given = (_given(node)[name] for name in ("running_mean", "running_var"))
    return [each for each in given if isinstance(each, fx.Node)]


def is_cheap(node: fx.Node) -> bool:
    """Return whether an operator may run twice: it multiplies no matrices, and updates no statistics."""
    if cost_of(node).flops or statistics_of(node):
        return False
    return is_view(node) or is_pointwise(node) or "norm" in str(node.target)


def is_never(_: fx.Node) -> bool:
    """Return false: what a region is grown with that copies no operator."""
    return False


def is_pointwise(node: fx.Node) -> bool:
    """Say if each element of the output depends on the same element of each input, after broadcasting."""
    target = node.target
    return target in _POINTWISE or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags  # noqa: SLF001
    )


@remembered
def rules_of(node: fx.Node) -> Sequence[ChunkRule]:
    """Return the ways to chunk a node, views and `getitem` left out; none for an operator without a rule."""
    is_operator = node.op == "call_function" and node.target is not operator.getitem and not is_random(node)
    if not is_operator or not all(isinstance(each.meta.get("val"), Tensor) for each in slots(node)):
        return []
    shapes, value = [shape_of(each) for each in slots(node)], node.meta["val"]
    if isinstance(value, Tensor) and is_pointwise(node):
        return _pointwise(node, shapes)
    if node.target in FACTORIES:
        return [ChunkRule((dim,), ()) for dim in range(value.dim())]
    return _RULES[node.target](node, shapes) if node.target in _RULES else []


def is_cut(node: fx.Node) -> bool:
    """Return whether an operator can run in chunks of some dimension, views and parts of results included."""
    is_part = node.target is operator.getitem or is_view(node)
    return is_part or not isinstance(node.target, torch._ops.OpOverload) or bool(rules_of(node))  # noqa: SLF001


@remembered
def inputs_for(node: fx.Node, index: int, axis: Axis) -> tuple[Axes, Axes] | None:
    """Return the axes of the inputs that give a chunk of output `index`, and those of all outputs.

    `None` where no chunk of the inputs gives a chunk of the output along `axis`.
    """
    if node.target in VIEWS or is_slice_along(node, axis):
        source = _source_axis(node, axis)
        return None if source is None else ((source,), (axis,))
    if groups_of(node) > 1 and axis.dim == 1:
        return _axes_of_groups(node, axis, shape_of(node))
    if axis.has_halo and (node.target in SHAPED or node.target in FACTORIES):
        return None
    window = window_of(node)
    if window is not None and index == 0 and axis.dim == ROWS:
        return _axes_of_rows(node, window, axis)
    return _inputs_by_rules(node, index, axis)


def _inputs_by_rules(node: fx.Node, index: int, axis: Axis) -> tuple[Axes, Axes] | None:
    """Return what output `index`, cut along `axis`, needs of the inputs, and how all outputs are then cut."""
    values = _outputs(node)
    if index >= len(values) or not isinstance(values[index], Tensor):
        return None
    ways = [
        next((way for way in rules_of(node) if index < len(way.outs) and way.outs[index] == dim), None)
        for dim in _wide(axis, values[index].shape)
    ]
    rules = [way for way in ways if way is not None]
    if len(rules) < len(ways):
        return None
    try:
        ins = tuple(
            _together(axis, [way.ins[slot] for way in rules], source.meta["val"])
            for slot, source in enumerate(slots(node))
        )
        outs = tuple(
            _together(axis, [way.outs[at] for way in rules], value) for at, value in enumerate(values)
        )
    except _Apart:
        return None
    return ins, outs


@remembered
def output_for(node: fx.Node, slot: int, axis: Axis) -> list[Axis]:
    """Return the axes that the first output can have where input `slot` is chunked along `axis`."""
    source = slots(node)[slot]
    if node.target in VIEWS or is_slice_along(node, axis):
        target = _target_axis(node, axis)
        return [] if target is None else [target]
    if groups_of(node) > 1 and slot == 0 and axis.dim == 1:
        axes = _axes_of_groups(node, axis, shape_of(source))
        return [] if axes is None else [each for each in axes[1] if each is not None]
    window = window_of(node)
    if window is not None and slot == 0 and axis.dim == ROWS:
        passed = window.passed(axis, _outputs(node)[0].shape)
        return [] if passed is None else [passed]
    ways = [
        [way.outs[0] for way in rules_of(node) if way.ins[slot] == dim and way.outs[0] not in {None, SUM}]
        for dim in _wide(axis, shape_of(source))
    ]
    found = []
    for dims in product(*ways):
        try:
            found.append(_together(axis, dims, _outputs(node)[0]))
        except _Apart:
            continue
    return [each for each in found if each is not None]


@remembered
def window_of(node: fx.Node) -> RowWindow | None:
    """Return which rows an operator on pictures takes; `None` for one that takes no rows besides its own."""
    if node.op != "call_function" or node.target not in _WINDOWED:
        return None
    given = _given(node)
    if node.target is _aten.upsample_nearest2d.default:
        source, made = shape_of(slots(node)[0])[ROWS], shape_of(node)[ROWS]
        is_whole = made % source == 0 and given["scales_h"] in {None, made / source}
        return RowWindow(factor=made // source) if is_whole else None
    if node.target is _aten.convolution.default:
        kernel, is_cut = shape_of(slots(node)[1])[ROWS], not given["transposed"]
    else:
        kernel = given["kernel_size"][0]
        is_batch = len(shape_of(slots(node)[0])) == ROWS + len(given["kernel_size"])  # else rows come earlier
        is_cut = is_batch and not given["ceil_mode"]
    stride = given["stride"][0] if given["stride"] else kernel
    dilation = given.get("dilation", [1])[0]
    window = RowWindow(stride=stride, padding=given["padding"][0], reach=dilation * (kernel - 1) + 1)
    is_pool = node.target is _aten.avg_pool2d.default  # it counts the rows that it makes up
    return None if not is_cut or window == RowWindow() or (is_pool and window.padding) else window


def cuts_pictures(node: fx.Node, axis: Axis) -> bool:
    """Return whether a chunk of an output along `axis` is a part of pictures whose parts meet in the node."""
    if node.target in _OWN:
        return axis.dim != (0 if node.target is norm_applied else 1)
    return axis.dim == ROWS and window_of(node) is not None


def has_pictures(graph: fx.Graph) -> bool:
    """Return whether parts of pictures meet in an operator of a graph."""
    return any(node.target in _OWN or window_of(node) is not None for node in graph.nodes)


def _axes_of_rows(node: fx.Node, window: RowWindow, axis: Axis) -> tuple[Axes, Axes] | None:
    """Return what rows of a result need of the input of an operator with a window, and how both are cut."""
    made = _outputs(node)
    found = window.axes(axis, shape_of(slots(node)[0]), made[0].shape)
    if found is None:
        return None
    taken, given = found
    return (taken, *[None] * (len(slots(node)) - 1)), (given, *[None] * (len(made) - 1))


def is_slice_along(node: fx.Node, axis: Axis) -> bool:
    """Say if a node takes neighbouring positions of the dimension of `axis`: of chunks it takes all."""
    if node.target is not _aten.slice.Tensor or axis.span > 1:
        return False
    given = _given(node)
    return bool(given["step"] == 1 and given["dim"] % len(shape_of(node)) == axis.dim)


def _source_axis(node: fx.Node, axis: Axis) -> Axis | None:
    source, value = slots(node)[0].meta["val"], node.meta["val"]
    if node.target in VIEWS:
        found = through_view(value.shape, source.shape, axis)
    else:
        found = through_slice(value.shape, axis, _first(node), source.shape[axis.dim])
    return found if found is not None and found.is_one_stride(source) else None


def _target_axis(node: fx.Node, axis: Axis) -> Axis | None:
    source, value = shape_of(slots(node)[0]), node.meta["val"]
    if node.target in VIEWS:
        found = through_view(source, value.shape, axis)
    else:
        found = through_slice(source, axis, -_first(node), value.shape[axis.dim])
    return found if found is not None and found.is_one_stride(value) else None


def _first(node: fx.Node) -> int:
    given = _given(node)
    start: int = given["start"] or 0
    size: int = shape_of(slots(node)[0])[given["dim"]]
    return min(start + size if start < 0 else start, size)


class _Apart(Exception):  # noqa: N818 (no error)
    """An operand has only some of the dimensions of an axis, or not side by side."""


def _wide(axis: Axis, shape: Sequence[int]) -> list[int]:
    """Return the dimensions of an axis that have more than one position; the only one whatever it has."""
    return [dim for dim in axis.dims if shape[dim] > 1 or axis.span == 1]


def _together(axis: Axis, dims: Sequence[int | None], value: Any) -> Axis | None:
    """Return the axis in an operand that has `dims` for its dimensions; `None` for an operand that is whole.

    Raises:
        _Apart: it has only some of them, or they do not lie as one.
    """
    found = [dim for dim in dims if dim is not None and dim != SUM]
    if not found:
        return None
    first, last = found[0], found[-1]
    between = (dim for dim in range(first, last + 1) if dim not in found)
    if len(found) < len(dims) or found != sorted(set(found)) or any(value.shape[dim] > 1 for dim in between):
        raise _Apart
    there = axis.at(first, last - first + 1)
    if not there.is_one_stride(value):
        raise _Apart
    return there


def sums(node: fx.Node) -> list[tuple[Axes, int]]:
    """Return the axes of the inputs for each way in which the output is a sum over chunks, and their size."""
    found = []
    for way in rules_of(node):
        if way.outs != (SUM,):
            continue
        given = zip(slots(node), way.ins, strict=True)
        size = next(shape_of(source)[dim] for source, dim in given if dim is not None)
        found.append((tuple(None if dim is None else Axis(dim, 1, size) for dim in way.ins), size))
    return found


def _pointwise(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    rank = len(shape_of(node))
    return [ChunkRule((dim,), tuple(_broadcast(each, dim, rank) for each in shapes)) for dim in range(rank)]


def _broadcast(shape: _Shape, dim: int, rank: int) -> int | None:
    """Return the dimension of an operand that becomes `dim` of `rank`; `None` where it is repeated."""
    at = dim - (rank - len(shape))
    return at if at >= 0 and shape[at] > 1 else None


def _outputs(node: fx.Node) -> Sequence[Any]:
    values = node.meta["val"]
    return values if isinstance(values, tuple | list) else (values,)


def _product(_: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Products of two matrices, or of batches of them, with or without a bias."""
    *bias, left, _right = shapes
    rank = len(left)
    ways: list[tuple[int | None, int | None]] = [(dim, dim) for dim in range(rank - 2)]
    ways += [(rank - 2, None), (None, rank - 1)]
    found = [
        ChunkRule((dim,), (*(_broadcast(each, dim, rank) for each in bias), *ins))
        for dim, ins in enumerate(ways)
    ]
    return found if bias else [*found, ChunkRule((SUM,), (rank - 1, rank - 2))]


def _permute(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Return the rules of a permutation: each dimension comes from one of the input."""
    rank, given = len(shapes[0]), _given(node)
    order = list(range(rank))
    if node.target is _aten.permute.default:
        order = [dim % rank for dim in given["dims"]]
    elif rank > 1:
        first, second = given.get("dim0", 0) % rank, given.get("dim1", 1) % rank
        order[first], order[second] = order[second], order[first]
    return [ChunkRule((dim,), (source,)) for dim, source in enumerate(order)]


def _along(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Operators that work along one dimension and keep the number of dimensions."""
    rank, count = len(shapes[0]), len(_outputs(node))
    dim = _given(node)["dim"] % rank if rank else 0
    return [ChunkRule((each,) * count, (each,) * len(shapes)) for each in range(rank) if each != dim]


def _select(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    rank, count = len(shapes[0]), len(_outputs(node))
    kept = [each for each in range(rank) if each != _given(node)["dim"] % rank]
    return [ChunkRule((out,) * count, (source,)) for out, source in enumerate(kept)]


def _stack(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    rank = len(shape_of(node))
    dim = _given(node)["dim"] % rank
    return [ChunkRule((each,), (each - (each > dim),) * len(shapes)) for each in range(rank) if each != dim]


def _reduce(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Return the rules of a reduction: kept dimensions go through, and those that a sum takes add up."""
    rank, values = len(shapes[0]), _outputs(node)
    reduced = _reduced_dims(node, rank)
    keeps = values[0].dim() == rank
    kept = [dim for dim in range(rank) if dim not in reduced]
    found = [ChunkRule(((dim if keeps else index),) * len(values), (dim,)) for index, dim in enumerate(kept)]
    if node.target in {_aten.sum.dim_IntList, _aten.sum.default}:
        found += [ChunkRule((SUM,), (dim,)) for dim in sorted(reduced)]
    return found


def _reduced_dims(node: fx.Node, rank: int) -> set[int]:
    dims = _given(node).get("dim")
    if isinstance(dims, int):
        dims = [dims]
    return {dim % rank for dim in dims} if dims and rank else set(range(rank))


def _norm(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Norms of the last dimensions, or of groups of channels."""
    is_of_groups = node.target is _aten.native_group_norm.default
    free = 1 if is_of_groups else len(shapes[0]) - len(node.args[1])  # type: ignore[arg-type]
    count, others = len(_outputs(node)), (None,) * (len(shapes) - 1)
    return [ChunkRule((dim,) * count, (dim, *others)) for dim in range(free)]


def _planes(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Pooling and resampling of pictures, and triangles of matrices: images and channels do not meet."""
    count = len(_outputs(node))
    return [ChunkRule((dim,) * count, (dim,) * len(shapes)) for dim in range(len(shapes[0]) - 2)]


def _convolution(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Images do not meet, nor do pixels where they are single; channels of the output are products."""
    stride, padding, dilation, is_transposed, _, groups = node.args[3:]
    others = (None,) * (len(shapes) - 1)
    found = [ChunkRule((0,), (0, *others))]
    if is_transposed:
        return found
    for dim, size in enumerate(shapes[1][2:]):
        options = tuple(each[dim % len(each)] for each in (stride, padding, dilation))  # type: ignore[arg-type, index]
        if size == 1 and options == (1, 0, 1):
            found.append(ChunkRule((2 + dim,), (2 + dim, *others)))
    if groups == 1:
        found.append(ChunkRule((1,), (None, 0, 0)[: len(shapes)]))
        if len(shapes) == _WITHOUT_BIAS:
            found.append(ChunkRule((SUM,), (1, 1)))
    return found


def groups_of(node: fx.Node) -> int:
    """Return the groups of a convolution, of which each has channels of its own; 1 for other operators."""
    if node.target is not _aten.convolution.default or node.args[6]:
        return 1
    groups: int = node.args[8]  # type: ignore[assignment]
    return groups


def _axes_of_groups(node: fx.Node, axis: Axis, shape: _Shape) -> tuple[Axes, Axes] | None:
    """Return the axes of inputs and outputs of a convolution, of which each position has whole groups.

    Args:
        axis: the axis in a tensor of `shape`, which the convolution takes or makes.
    """
    if axis.span > 1 or groups_of(node) % axis.size or axis.inner * axis.size != shape[1]:
        return None
    source, *others = (shape_of(each) for each in slots(node))
    made = Axis(1, shape_of(node)[1] // axis.size, axis.size)
    return (made.at(1)._replace(inner=source[1] // axis.size), *(made.at(0) for _ in others)), (made,)


def _embedding(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    if _given(node).get("sparse"):  # chunks of a sparse gradient cannot be put together
        return []
    return [ChunkRule((dim,), (None, dim)) for dim in range(len(shapes[1]))]


def _attention(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Fused attention of (B, H, S, K): batches and heads do not meet, nor do queries without causality."""
    given, query, key = _given(node), shapes[0], shapes[1]
    if given.get("dropout_p", 0.0):
        return []
    biases = [given[name] for name in ("attn_mask", "attn_bias") if isinstance(given.get(name), fx.Node)]
    ways: list[tuple[int | None, ...]] = [(0, 0, 0)]
    if query[1] == key[1]:
        ways.append((1, 1, 1))
    if not given.get("is_causal", False):
        ways.append((2, None, None))
    values = _outputs(node)
    count = sum(isinstance(each, Tensor) and each.dim() >= 3 for each in values)  # noqa: PLR2004
    unusable = (None,) * (len(values) - count)
    found = []
    for dim, *others in ways:
        assert dim is not None
        of_bias = (_broadcast(shape_of(bias), dim, 4) for bias in biases)
        found.append(ChunkRule((dim,) * count + unusable, (dim, *others, *of_bias)[: len(shapes)]))
    return found


def _nll_loss(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Negative log-likelihoods, one a target: scores have a dimension of classes behind that of samples."""
    if node.args[3] != 0:
        return []
    whole = (None,) * (len(shapes) - 2)
    return [ChunkRule((dim, None), (dim + (dim > 0), dim, *whole)) for dim in range(len(shapes[1]))]


def _gather(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    shape, index = shapes
    dim = node.args[1] % len(shape) if shape else 0  # type: ignore[operator]
    same = [each for each in range(len(shape)) if each != dim and shape[each] == index[each]]
    return [ChunkRule((each,), (each, each)) for each in same]


def _batch_norm(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Batch norm: channels do not meet; with running statistics in place of the batch's, nothing does."""
    others = len(shapes) - 1
    if _given(node)["training"]:
        is_alone = all(len(each.users) == 1 for each in statistics_of(node))
        return [ChunkRule((1, 0, 0), (1, *(0,) * others))] if is_alone else []
    dims = [dim for dim in range(len(shapes[0])) if dim != 1]
    found = [ChunkRule((dim, None, None), (dim, *(None,) * others)) for dim in dims]
    return [*found, ChunkRule((1, None, None), (1, *(0,) * others))]


def _pad(node: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    free = len(shapes[0]) - len(node.args[1]) // 2  # type: ignore[arg-type]
    return [ChunkRule((dim,), (dim,)) for dim in range(free)]


def _norm_sums(_: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Two sums of each channel of each image: positions are added up."""
    others = range(2, len(shapes[0]))
    return [ChunkRule((1,), (0,)), ChunkRule((2,), (1,)), *(ChunkRule((SUM,), (dim,)) for dim in others)]


def _norm_scales(_: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    return [ChunkRule((1,), (1, *(None,) * (len(shapes) - 1)))]


def _norm_applied(_: fx.Node, shapes: Sequence[_Shape]) -> list[ChunkRule]:
    """Return the rules of a scaled input: scales are cut with its batch and channels alone."""
    others = range(2, len(shapes[0]))
    return [
        ChunkRule((0,), (0, 1)),
        ChunkRule((1,), (1, 2)),
        *(ChunkRule((dim,), (dim, None)) for dim in others),
    ]


_POINTWISE = frozenset(
    {
        _aten.clone.default,
        _aten.contiguous.default,
        _aten._to_copy.default,  # noqa: SLF001
        _aten.where.self,
        _aten.masked_fill.Scalar,
        _aten.masked_fill.Tensor,
        _aten.rsqrt.default,
        _aten.hardswish.default,
        _aten.detach.default,
    }
)
_WINDOWED = frozenset(
    {
        _aten.convolution.default,
        _aten.max_pool2d_with_indices.default,
        _aten.avg_pool2d.default,
        _aten.upsample_nearest2d.default,
    }
)
_OPERATORS: dict[Callable[[fx.Node, Sequence[_Shape]], list[ChunkRule]], str] = {
    _product: "mm.default addmm.default bmm.default baddbmm.default",
    _permute: "permute.default transpose.int t.default",
    _pointwise: "expand.default",
    _along: """_softmax.default _log_softmax.default _safe_softmax.default slice.Tensor cat.default
        split.Tensor split_with_sizes.default cumsum.default sort.default topk.default""",
    _select: "select.int unbind.int",
    _stack: "stack.default",
    _reduce: """sum.dim_IntList sum.default mean.dim amax.default amin.default argmax.default
        logsumexp.default var.correction var_mean.correction""",
    _norm: "native_layer_norm.default native_group_norm.default _fused_rms_norm.default",
    _batch_norm: "native_batch_norm.default",
    _convolution: "convolution.default",
    _embedding: "embedding.default",
    _gather: "gather.default",
    _nll_loss: "nll_loss_forward.default nll_loss2d_forward.default",
    _pad: "constant_pad_nd.default",
    _planes: """tril.default triu.default upsample_nearest2d.default upsample_bilinear2d.default
        avg_pool2d.default max_pool2d_with_indices.default _adaptive_avg_pool2d.default""",
    _attention: """_scaled_dot_product_flash_attention_for_cpu.default
        _scaled_dot_product_flash_attention.default _scaled_dot_product_efficient_attention.default
        _scaled_dot_product_cudnn_attention.default""",
}
_OWN: dict[Any, Callable[[fx.Node, Sequence[_Shape]], list[ChunkRule]]] = {
    norm_sums: _norm_sums,
    norm_scales: _norm_scales,
    norm_applied: _norm_applied,
}
_RULES = _OWN | {
    operator.attrgetter(name)(_aten): rule for rule, names in _OPERATORS.items() for name in names.split()
}

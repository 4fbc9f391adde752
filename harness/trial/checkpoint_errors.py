"""Errors of torch's checkpoint where a recomputation is not forward, with block and operator."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, TracebackType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

from strategies.last_words import last_words
from strategies.regions.blocks import plain_named_modules

_UNPACKING = (
    "unpack_hook"  # of torch.utils.checkpoint, with the holder it was asked for and its region's frame
)
_OF_MODELS = (
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What code of a model raises where it is recomputed with something else than before."""

_TIP = "Tip: "
_TWICE = "already unpacked once"
_DEEPEST = 6
_OF_A_REGION = {  # in torch's words -> what it means for the region
    "modified by an inplace operation": "an argument of it is changed in place; perhaps x.clone() helps",
    "has been mutated": "a tensor that is kept for it is changed in place; perhaps x.clone() helps",
    "not found in storage": "it runs an operator that forward did not; perhaps state has changed since",
}


def described(error: CheckpointError, loss: Tensor, model: nn.Module) -> CheckpointError:
    """Return `error` with the block whose recomputation failed, and the operator for which.

    The operator is the first whose saved tensor is not repeated; where torch does not say which that is, the
    one whose backward asked.

    Args:
        error: what backward raised.
        loss: what backward began with; its graph still says which operator saved what.
        model: model whose names are used.
    """
    torchs_words = last_words(error).message.partition(_TIP)[0].strip()
    unpacking = _unpacking(error.__traceback__)
    if unpacking is None:
        return CheckpointError(torchs_words)
    operator = _operator_of(
        loss.grad_fn, _first_unlike(unpacking["frame"], torchs_words, unpacking["holder"])
    )
    block = _block_of(unpacking["frame"].recompute_fn, model)
    if _TWICE in torchs_words:
        return CheckpointError(
            f"backward of {operator or 'an operator'!r} asks twice for what {block} recomputes once; "
            f"read ctx.saved_tensors once, into names. {torchs_words}"
        )
    needed = f", needed by operator {operator!r}" if operator else ""
    cause = _growing(unpacking) or "perhaps something that it reads has changed since"
    return CheckpointError(
        f"the recomputation of {block} does not repeat its forward{needed}: {cause}. {torchs_words}"
    )


def backward(loss: Tensor, model: nn.Module) -> None:
    """Accumulate gradients.

    Raises:
        RuntimeError: a recomputation does not repeat forward; the message names block and operator.
    """
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except _OF_MODELS as error:
        told = explained(error, loss, model)
        if told is None:
            raise
        raise told from error


def explained(error: Exception, loss: Tensor, model: nn.Module) -> RuntimeError | None:
    """Return `error` with the block that cannot be recomputed; `None` where no recomputation raised it.

    Args:
        error, loss, model: as of `described`.
    """
    if isinstance(error, CheckpointError):
        return described(error, loss, model)
    meaning = next(
        (meaning for words, meaning in _OF_A_REGION.items() if words in last_words(error).message), None
    )
    unpacking = _unpacking(error.__traceback__)
    if unpacking is None:
        return None
    block = _block_of(unpacking["frame"].recompute_fn, model)
    torchs_words = last_words(error).message.partition(" Hint: ")[0].strip()
    if meaning is None:
        cause = _growing(unpacking)
        said = f"the recomputation of {block} raises {type(error).__name__}: {torchs_words}"
        return RuntimeError(f"{said}; {cause}" if cause else said)
    return RuntimeError(f"{block} cannot be recomputed: {meaning}. {torchs_words}")


def _unpacking(trace: TracebackType | None) -> dict[str, Any] | None:
    """Return the variables of the outermost call that asks a region for a tensor."""
    while trace is not None:
        found = dict(trace.tb_frame.f_locals)  # Python 3.13 gives a proxy, whose keys are a list
        if trace.tb_frame.f_code.co_name == _UNPACKING and {"frame", "holder"} <= found.keys():
            return found
        trace = trace.tb_next
    return None


def _growing(unpacking: Mapping[str, Any]) -> str:
    """Return what to do where a region got a list, which its caller may change; nothing where it did not.

    Torch keeps such an argument as it is, not what was in it: blocks of a DenseNet get one that grows.
    """
    if not any(isinstance(each, list) for each in unpacking.get("args", ())):
        return ""
    remedy = "call the block with list(x), a copy, or use ac=offload, ac=nested or ac=budget"
    return f"it gets a list, which may have changed since forward; {remedy}"


def _first_unlike(frame: Any, torchs_words: str, asked: Any) -> Any:
    position = re.search(r"tensor at position (\d+)", torchs_words)
    fewer = re.search(r"saved during recomputation: (\d+)", torchs_words)
    index = int((position or fewer).group(1)) if position or fewer else len(frame.weak_holders)  # type: ignore[union-attr]
    holder = frame.weak_holders[index]() if index < len(frame.weak_holders) else None
    return asked if holder is None else holder


def _operator_of(root: Node | None, holder: Any) -> str | None:
    """Return the operator whose autograd node keeps `holder`; nodes that have run keep nothing."""
    for node in _nodes(root):
        for name in dir(node):
            if name.startswith("_raw_saved_") and _holds(node, name, holder):
                return _operator_name(str(node.name()))
    return None


def _holds(node: Node, name: str, holder: Any) -> bool:
    """Return whether an autograd node has saved `holder` under this name."""
    try:
        saved = getattr(node, name)
    except RuntimeError:  # it has run, and let go of what it had saved
        return False
    each = saved if isinstance(saved, tuple | list) else (saved,)
    return any(_packed(getattr(one, "data", None)) is holder for one in each)


def _packed(data: Any) -> Any:
    """Return what torch's checkpoint has packed, also where a ticket of ours stands for it."""
    unpacking = getattr(data, "packed", None)
    return unpacking.args[0] if isinstance(unpacking, functools.partial) else data


def _nodes(root: Node | None) -> Iterator[Node]:
    seen: set[Node | None] = {None}
    left = [root]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def _operator_name(node: str) -> str:
    bare = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()


def _block_of(recompute: Any, model: nn.Module) -> str:
    names = {id(module): name for name, module in plain_named_modules(model)}
    for module in modules_in(recompute):
        if id(module) in names:
            return f"{names[id(module)]!r}" if names[id(module)] else "the model"
    return "a region"


def modules_in(function: Any, *, depth: int = 0) -> Iterator[nn.Module]:
    """Yield the modules that a function closes over, nearest first."""
    if isinstance(function, nn.Module):
        yield function
    for inner in _parts_of(function) if depth < _DEEPEST else ():
        yield from modules_in(inner, depth=depth + 1)


def _parts_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args)
    if isinstance(value, FunctionType):
        return tuple(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
    return ()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is bound later
        return False

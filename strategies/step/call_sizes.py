"""Sizes of what a block computes with in one call, and how they differ from those of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.estimate.tensors import tensors_in
from strategies.step.sizes import TensorSize

OTHER_OPERATORS = (
    "ac=budget: a block runs other operators on smaller inputs than on the planned ones, and what follows "
    "them is recomputed. Gradients are those of the plain block"
)
FIRST_CALL = (
    "ac=budget: the first call of a block makes what later ones find, by operators that its plan lacks, and "
    "what follows them is recomputed. Gradients are those of the plain block, and this step may need more "
    "bytes than the plan says"
)
OTHERS_BEFORE = (
    "ac=budget: before the first block other operators run than those of its plan, and its input stays. "
    "Gradients are those of the plain model, and the step may need more bytes than the plan says"
)
"""What Python warns of."""

_kind_of = attrgetter("shape", "dtype", "device", "requires_grad")
_INPUT = "input "
_DOUBLE = "float64 "
_FLOATING = ("float", "bfloat")


def sizes_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSize, ...]:
    """Return the sizes of the inputs of a call, in order, and of the parameters of `module`.

    Shapes are global ones: ranks that shard parameters have equal sizes.
    """
    return *input_sizes(args, kwargs), *parameter_sizes(module)


def parameter_sizes(module: nn.Module, fqn: str = "") -> tuple[TensorSize, ...]:
    """Return the sizes of parameters.

    Args:
        fqn: what their names begin with, where a call has several modules.
    """
    before = f"{fqn}." if fqn else ""
    return tuple(_size(f"parameter {before}{name}", each) for name, each in module.named_parameters())


def size_key(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what `sizes_of` follows from, and what has gradients: equal ones have equal sizes.

    It costs less to find.
    """
    found = input_key(args, kwargs)
    _add_parameters(module, found)
    return found


def input_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the part of `size_key` that inputs give."""
    return list(map(_kind_of, tensors_in((args, kwargs))))


def _add_parameters(module: nn.Module, found: list[Any]) -> None:
    """Add names, identities and sizes: one parameter under two names is one, as long as it is the same."""
    for name, each in module._parameters.items():  # noqa: SLF001 (a tenth of the time of named_parameters)
        if each is not None:
            found.append((name, id(each), *_kind_of(each)))
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            found.append(name)
            _add_parameters(child, found)


def input_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSize, ...]:
    """Return the sizes of the inputs of a call, in order."""
    return tuple(_size(f"{_INPUT}{n}", each) for n, each in enumerate(tensors_in((args, kwargs))))


def difference(planned: Sequence[TensorSize], found: Sequence[TensorSize]) -> str | None:
    """Return how the sizes of a call are not the planned ones; `None` where they are, or inputs are smaller.

    Smaller inputs, such as the last batch of an epoch or a micro-batch, need no more bytes. A model that was
    made float64, as checks of gradients do, is as it was planned.

    Args:
        planned: sizes that the plan was made for.
    """
    if planned == found:
        return None
    kinds = {each.name: each.kind for each in planned} if _is_double(found) else {}
    here = {each.name: each._replace(kind=kinds.get(each.name, each.kind)) for each in found}
    pairs = [(each, here.pop(each.name, None)) for each in planned]
    unlike = next((pair for pair in pairs if not _fits(*pair)), None)
    if unlike is not None:
        return _worded(*unlike)
    return next((f"made without {_described(each)}" for each in here.values()), None)


def _size(name: str, tensor: Tensor) -> TensorSize:
    if tensor.is_nested:
        problem = f"{name} of a call is a nested tensor, whose sizes are data, and plans are for sizes"
        raise StrategyError("ac", f"{problem}; use ac=full, ac=nested or ac=selective_op")
    kind = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
    return TensorSize(name, tuple(map(int, tensor.shape)), kind)


def _is_double(found: Sequence[TensorSize]) -> bool:
    """Say whether all floating-point parameters, of which there are some, are float64."""
    kinds = [each.kind for each in found if not each.name.startswith(_INPUT)]
    return any(kind.startswith(_DOUBLE) for kind in kinds) and all(
        kind.startswith(_DOUBLE) for kind in kinds if kind.startswith(_FLOATING)
    )


def _fits(planned: TensorSize, found: TensorSize | None) -> bool:
    if found is None or found.kind != planned.kind or len(found.shape) != len(planned.shape):
        return False
    if planned.name.startswith(_INPUT):
        return all(size <= most for size, most in zip(found.shape, planned.shape, strict=True))
    return found.shape == planned.shape


def _worded(planned: TensorSize, found: TensorSize | None) -> str:
    if found is None:
        return f"made for {_described(planned)}, which this call has not"
    if found.kind == planned.kind:
        return f"made for {planned.name} of {planned.shape}, not {found.shape}"
    return f"made for {_described(planned)}, not {found.shape} {found.kind}"


def _described(size: TensorSize) -> str:
    return f"{size.name} of {size.shape} {size.kind}"

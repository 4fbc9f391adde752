"""A block whose forward runs again in backward, with the parameters and buffers that it had."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves
from torch.utils.checkpoint import checkpoint

from strategies.written.runtime.found_blocks import NAME

NUMBERS = frozenset({bool, float, int, str})


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def weights(block: nn.Module) -> set[tuple[int, int]]:
    """Return identities and versions of a block's parameters, without those that FSDP exchanges."""
    kinds = {kind.__name__ for each in block.modules() for kind in type(each).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return set()
    own = [each for each in block.parameters() if not getattr(each._base, "_is_flat_param", False)]
    return {(id(each), version(each)) for each in own}


def others(block: nn.Module, given: Sequence[Any]) -> list[tuple[Tensor, int]]:
    """Return what a block reads besides, with versions: buffers, attributes, and what arguments hold."""
    owners = [own for each in block.modules() for own in (each._buffers, vars(each))]
    held = [value for own in owners for name, value in own.items() if name not in {"_parameters", "_modules"}]
    parts = [each for each in (*held, *given) if isinstance(each, (dict, list, tuple))]
    tensors = [*(each for each in held if isinstance(each, Tensor)), *tensors_in(parts)]
    return [(each, version(each)) for each in tensors]


def tensors_in(parts: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in containers, which may hold themselves, or a million numbers."""
    found, seen, waiting = list[Tensor](), set[int](), list(parts)
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (dict, list, tuple, deque)):
            held = () if id(each) in seen else each.values() if isinstance(each, dict) else each
            seen.add(id(each))
            waiting += [one for one in held if type(one) not in NUMBERS]
        elif type(each) in SUPPORTED_NODES:
            waiting += tree_leaves(each)
    return found


def storages(values: Any) -> set[int]:
    """Return the identities of what tensors stand on."""
    tensors = [
        getattr(each, "_local_tensor", each) for each in tree_leaves(values) if isinstance(each, Tensor)
    ]
    strided = (each for each in tensors if each.layout is torch.strided and not each.is_nested)
    return {each.untyped_storage()._cdata for each in strided}


class Reading(TorchDispatchMode):
    """Refuses operators that read what was written to since forward."""

    def __init__(self, block: nn.Module, written: set[int]) -> None:
        super().__init__()
        self.block, self.written = block, written

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.written & storages((args, kwargs)):
            problem = f"a {type(self.block).__name__} reads in backward what was written to since forward"
            raise RuntimeError(f"{NAME}: {problem}; write to it after backward, or to a copy")
        return op(*args, **(kwargs or {}))


def called_again(
    block: nn.Module,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Return `body(block, *args, **kwargs)`, which runs again in backward."""
    count, is_compiled = len(args), torch.compiler.is_compiling()
    found = set[tuple[int, int]]() if is_compiled else weights(block)
    before = [] if is_compiled else others(block, (*args, *kwargs.values()))
    left: list[tuple[Tensor, int]] = []

    def run(*given: Any) -> Any:  # torch looks for devices of random numbers among positions alone
        if found and not found <= weights(block):
            problem = f"a {type(block).__name__} has other parameters in backward than in forward"
            raise RuntimeError(f"{NAME}: {problem}; run backward with these, and before an optimizer's step")
        written = storages([each for each, then in left if version(each) != then])
        with Reading(block, written) if written else nullcontext():
            result = body(block, *given[:count], **dict(zip(kwargs, given[count:], strict=True)))
        # what forward itself writes to is its state
        left.extend(each for each in before if version(each[0]) == each[1])
        before.clear()
        return result

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **options)

"""A block whose forward runs again in backward, with the parameters that it had."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from strategies.written.runtime.found_blocks import NAME


def weights(block: nn.Module) -> set[tuple[int, int]]:
    """Return identities and versions of a block's parameters, without those that FSDP exchanges."""
    kinds = {kind.__name__ for each in block.modules() for kind in type(each).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return set()
    own = [each for each in block.parameters() if not getattr(each._base, "_is_flat_param", False)]
    return {(id(each), 0 if each.is_inference() else each._version) for each in own}


def called_again(
    block: nn.Module,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **options: Any,
) -> Any:
    """Return `body(block, *args, **kwargs)`, which runs again in backward."""
    count, found = len(args), set[tuple[int, int]]() if torch.compiler.is_compiling() else weights(block)

    def run(*given: Any) -> Any:  # torch looks for devices of random numbers among positions alone
        if found and not found <= weights(block):
            problem = f"a {type(block).__name__} has other parameters in backward than in forward"
            raise RuntimeError(f"{NAME}: {problem}; run backward with these, and before an optimizer's step")
        return body(block, *given[:count], **dict(zip(kwargs, given[count:], strict=True)))

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **options)

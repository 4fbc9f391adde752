"""The parameters that a module has: those that its forward found, and those that its recomputation finds.

`torch.func.functional_call` gives a module other parameters for one call. A recomputation in a backward
outside of it would read the module's own, and gradients would be of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from strategies.base import StrategyError
from strategies.regions.blocks import plain_class
from strategies.regions.rewind import all_modules, is_lent


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of `module` and the modules in it, faster than torch does."""
    return [
        each
        for part in all_modules(module)
        for each in part._parameters.values()  # noqa: SLF001 (without names)
        if each is not None
    ]


def identities_of(weights: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the identities of `weights`, without those that FSDP1 lends, and lends anew."""
    return tuple([id(weight) for weight in weights if not is_lent(weight)])


def of_other_parameters(name: str) -> StrategyError:
    """Return the error of a module that ran with parameters that are not its own."""
    problem = f"{name} ran with other parameters in forward than it has now"
    return StrategyError(
        "ac", f"{problem}; call it in a module that gives it these (torch.func.functional_call)"
    )


def with_own_parameters(
    module: nn.Module, body: Callable[..., Any], weights: Iterable[Tensor]
) -> Callable[..., Any]:
    """Return `body`, which refuses to run again where `module` has other parameters than now.

    Modules with units of FSDP are not asked: these exchange parameters before the body and inside of it.

    Args:
        body: what runs with its parameters, once and again.
        weights: its parameters now; of modules with units any.

    Raises:
        StrategyError: from the second run on, naming the class of the module.
    """
    found, is_first = identities_of(weights), True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
        elif identities_of(weights_of(module)) != found and not any(map(is_unit, all_modules(module))):
            raise of_other_parameters(f"a {plain_class(module).__name__}")
        return body(*args, **kwargs)

    return run


def is_unit(module: nn.Module) -> bool:
    """Say whether FSDP exchanges the parameters of `module`."""
    return isinstance(module, FSDPModule | FullyShardedDataParallel)

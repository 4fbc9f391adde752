"""Units of FSDP2 inside a block, whose weights come and go while the block runs.

Experts that ranks share are such units, and modules of another dtype than their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from strategies.estimate.patched import wrapped
from strategies.regions.torch_facts import parameter_groups

_MOVES = ("unshard", "wait_for_unshard", "reshard")
"""Methods of a group of parameters that gather weights and free them."""


def inner_units(module: nn.Module) -> list[FSDPModule]:
    """Return the units inside `module`, without itself."""
    return [each for each in module.modules() if isinstance(each, FSDPModule) and each is not module]


@contextmanager
def gathered_aside(
    units: Iterable[FSDPModule], aside: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Let units gather and free their weights in contexts of their own, inside the scope.

    What they do then is no operator of the forward that calls them: the first step takes others than later
    ones.

    Args:
        units: units inside of a module that runs.
        aside: makes such a context.
    """

    def move(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with aside():
            return original(*args, **kwargs)

    with ExitStack() as scopes:
        for group in (group for unit in units for group in parameter_groups(unit)):
            for name in _MOVES:
                scopes.enter_context(wrapped(group, name, move))
        yield

"""Units of FSDP2 inside a block, whose weights come and go while the block runs.

Experts that ranks share are such units, and modules of another dtype than their block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from strategies.estimate.liveness import key_of
from strategies.estimate.patched import wrapped
from strategies.regions.saved_tensors import local_of
from strategies.regions.torch_facts import parameter_groups

_MOVES = ("unshard", "wait_for_unshard", "reshard")
"""Methods of a group of parameters that gather weights and free them."""


def units_of(module: nn.Module) -> list[FSDPModule]:
    """Return the units that `module` consists of: itself, where it is one, and those inside."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def inner_units(module: nn.Module) -> list[FSDPModule]:
    """Return the units inside `module`, without itself."""
    return [each for child in module.children() for each in units_of(child)]


def gather(units: Iterable[FSDPModule]) -> Callable[[], None]:
    """Let units have their weights; return what frees those that this has gathered.

    Call that before the step ends. FSDP2 frees no unit that is gathered after its own backward, and the next
    forward would run with the weights of this step.
    """
    freed = []
    for unit in units:
        if not _has_weights(unit):
            freed.append(unit)
        unit.unshard()  # one that waits for its weights gets them

    def give_back() -> None:
        for unit in freed:
            unit.reshard()

    return give_back


def _has_weights(unit: FSDPModule) -> bool:
    """Say whether a unit has its weights, or waits for them."""
    return all(each.is_unsharded or each._all_gather_result for each in parameter_groups(unit))  # noqa: SLF001 (no public way to ask)


def with_weights_in(storages: Collection[int], units: Iterable[FSDPModule]) -> list[FSDPModule]:
    """Return those of `units` that have weights in one of the storages, in their order.

    Args:
        storages: the storages, by `key_of`; freed or not.
        units: units that have had their weights.
    """
    return [unit for unit in units if not _storages_of(unit).isdisjoint(storages)]


def _storages_of(unit: FSDPModule) -> set[int]:
    weights = (each._unsharded_param for group in parameter_groups(unit) for each in group.fsdp_params)  # noqa: SLF001 (no public way)
    return {key_of(local) for weight in weights if (local := local_of(weight)) is not None}


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

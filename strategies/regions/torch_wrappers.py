"""Wrappers of torch around modules (`checkpoint_wrapper`, `offload_wrapper`) as regions: names stay plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from strategies.regions import region
from strategies.regions.region import Unobserved

_INNER = "_checkpoint_wrapped_module"


def as_regions(model: nn.Module) -> nn.Module:
    """Return `model` with each wrapper of torch as a region around the module that it holds, in place.

    A wrapper is a module of its own: it would rename parameters, and FSDP1 would take its place.
    """
    holder = nn.ModuleDict({"model": model})
    places = [
        (parent, name)
        for parent in holder.modules()
        for name, child in parent.named_children()
        if isinstance(child, ActivationWrapper)
    ]
    for parent, name in reversed(places):  # the innermost first
        wrapper = cast("ActivationWrapper", parent._modules[name])  # noqa: SLF001 (a wrapper forwards getattr)
        inner = cast("nn.Module", wrapper._modules[_INNER])  # noqa: SLF001 (as above)
        body = _Body()
        wrapper._modules[_INNER] = body  # noqa: SLF001 (as above)
        outer, before = _TorchWrapper(wrapper=wrapper, body=body), region.region_of(inner)
        region.enclose(inner, outer if before is None else region.Around(outer=outer, inner=before))
        parent._modules[name] = inner  # noqa: SLF001 (as above)
    return holder["model"]


class _Body(nn.Module):
    """Stands in a wrapper for the module that it held, and calls that one's forward."""

    forward_of_module: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward returns."""
        return self.forward_of_module(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TorchWrapper(Unobserved):
    """A region that is a wrapper of torch."""

    wrapper: ActivationWrapper
    body: _Body

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 (`body` is bound to it)
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`, run by the wrapper."""
        self.body.forward_of_module = body
        return self.wrapper(*args, **kwargs)

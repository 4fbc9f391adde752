"""The region of nested AC: stands around a model's forward, and has its tapes written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.base import Observation
from strategies.nested.listening import running_backward
from strategies.nested.nest_options import Nest
from strategies.nested.nested_regions import NestedRegion, Path
from strategies.nested.tape_listing import regions_of
from strategies.nested.tape_writer import TapeWriter
from strategies.regions.own_parameters import weights_of


class NestedForward:
    """The region around a model's forward. `settings`: what is to be done."""

    def __init__(self, settings: Nest) -> None:
        self._nest = settings
        self._is_running = False
        self._calls: list[tuple[str, Path | None]] = []

    def __reduce__(self) -> tuple[type[NestedForward], tuple[Nest]]:
        return NestedForward, (self._nest,)

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, with the regions in it recomputed where gradients are asked for.

        Raises:
            StrategyError: the labels do not fit what forward does, or a region cannot be recomputed.
        """
        if not torch.is_grad_enabled() or self._is_running:
            return body(*args, **kwargs)
        if running_backward() == -1:
            self._nest.ledger.begin_forward()
        floor = None if self._nest.labels.is_partial else ()
        writer = TapeWriter(self._nest, module, _devices(module, args, kwargs), floor=floor)
        self._is_running = True
        try:
            with writer.following():
                result = body(*args, **kwargs)
        finally:
            self._is_running = False
        if not self._calls:
            writer.check_calls(is_whole=False)
        self._calls = writer.calls
        return result

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, and the regions, once they are known."""
        regions = [self._described(each) for each in regions_of(self._calls)]
        return Observation(
            offloaded_bytes=self._nest.ledger.offloaded_bytes,
            plan={"regions": regions} if self._calls else None,
        )

    def _described(self, region: NestedRegion) -> dict[str, Any]:
        """Return a region and those inside as JSON values, with the bytes that each has moved."""
        traffic = self._nest.ledger.traffic_of(region.path)
        return {
            "region": region.name,
            "first": self._calls[region.start][0],
            "last": self._calls[region.stop - 1][0],
            "calls": region.stop - region.start,
            "recomputed": region.path not in self._nest.kept,
            "offload": self._nest.offload.get(region.path),
            "moved_bytes": traffic.moved_bytes,
            "fetched_bytes": traffic.fetched_bytes,
            "regions": [self._described(inner) for inner in region.regions],
        }


def _devices(module: nn.Module, *inputs: Any) -> frozenset[torch.device]:
    """Return the devices whose random numbers a forward may draw."""
    given: Iterator[Any] = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    found = {tensor.device for tensor in chain(given, weights_of(module))}
    return frozenset(device for device in found if device.type != "meta")

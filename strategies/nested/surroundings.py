"""The surroundings of a call in addition to its arguments: modes of torch, and torch's generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.backends import cuda

from strategies.generators import State, moved, of_devices

_DEVICES = ("cpu", "cuda")
_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes of torch.

    Fields:
        autocast: whether and to what dtype it casts, by device type.
        caches: autocast keeps what it has cast.
        kernels: kernels of attention that may be chosen.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    caches: bool
    kernels: tuple[bool, ...]

    @classmethod
    def now(cls) -> Modes:
        """Return the modes that are on."""
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        return cls(
            torch.is_grad_enabled(),
            tuple([(enabled(each), dtype(each)) for each in _DEVICES]),
            torch.is_autocast_cache_enabled(),
            tuple([is_enabled() for is_enabled, _ in _KERNELS]),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Turn these modes on for the block."""
        before = Modes.now()
        if before == self:
            with torch.set_grad_enabled(self.grad):
                yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, wanted, found in zip(_DEVICES, self.autocast, before.autocast, strict=True):
                if wanted != found:
                    enabled, dtype = wanted
                    autocast = torch.autocast(device, dtype, enabled=enabled, cache_enabled=self.caches)
                    stack.enter_context(autocast)
            if self.kernels != before.kernels:
                _choose(self.kernels)
                stack.callback(_choose, before.kernels)
            yield


class DrawnNumbers:
    """Knows where the calls on a tape left torch's generators.

    Args:
        devices: devices of the generators; `None` where their states do not matter.
    """

    def __init__(self, devices: Iterable[torch.device] | None) -> None:
        self._sources = [] if devices is None else of_devices(devices)
        self._latest: list[State] = []

    def note(self) -> None:
        """Take note that a call has drawn."""
        self._latest = [each.now() for each in self._sources]

    def set_in_between(self) -> list[State]:
        """Return the states of generators that were set, or drawn from, by what is not on the tape."""
        return [each.source.now() for each in moved(self._latest)]

    def forget(self) -> None:
        """Know nothing of the calls before."""
        self._latest = []


def _choose(kernels: Iterable[bool]) -> None:
    for (_, enable), enabled in zip(_KERNELS, kernels, strict=True):
        enable(enabled)

"""What a call finds around it beside its arguments: modes of torch, and the generators of random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.backends import cuda
from torch.utils._python_dispatch import _disable_current_modes

GeneratorStates: TypeAlias = dict[torch.device, Tensor]
"""States of torch's generators, by device."""

CPU = torch.device("cpu")
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
        grad: autograd follows.
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


def generator_states(devices: Iterable[torch.device]) -> GeneratorStates:
    """Return the states of the generators of `devices`."""
    return {device: _module(device).get_rng_state(device) for device in devices if device != CPU} | {
        CPU: torch.default_generator.get_state()  # torch.get_rng_state is what meters of memory follow
    }


def set_generators(states: Mapping[torch.device, Tensor]) -> None:
    """Put the generators into `states`."""
    for device, state in states.items():
        if device == CPU:
            torch.default_generator.set_state(state)
        else:
            _module(device).set_rng_state(state, device)


class DrawnNumbers:
    """Knows where the calls on a tape left torch's generators.

    Args:
        devices: devices of the generators; `None` where their states do not matter.
    """

    def __init__(self, devices: Iterable[torch.device] | None) -> None:
        self._devices = devices
        self._latest: GeneratorStates | None = None

    def note(self) -> None:
        """Take note that a call has drawn."""
        if self._devices is not None:
            self._latest = generator_states(self._devices)

    def set_in_between(self) -> GeneratorStates | None:
        """Return the states of generators that were set, or drawn from, by what is not on the tape."""
        if self._latest is None or self._devices is None:
            return None
        now = generator_states(self._devices)
        with _disable_current_modes():  # states have values even where tensors have none
            are_equal = all(_bytes(state) == _bytes(self._latest[device]) for device, state in now.items())
        return None if are_equal else now

    def forget(self) -> None:
        """Know nothing of the calls before."""
        self._latest = None


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def _choose(kernels: Iterable[bool]) -> None:
    for (_, enable), enabled in zip(_KERNELS, kernels, strict=True):
        enable(enabled)

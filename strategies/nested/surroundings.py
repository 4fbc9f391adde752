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
        return cls(
            torch.is_grad_enabled(),
            tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES),
            torch.is_autocast_cache_enabled(),
            tuple(is_enabled() for is_enabled, _ in _KERNELS),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Turn these modes on for the block."""
        before = Modes.now()
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


def are_equal(left: GeneratorStates, right: GeneratorStates) -> bool:
    """Say whether generators that both know are in one state."""
    with _disable_current_modes():  # states are values even where tensors have none
        return all(torch.equal(state, right[device]) for device, state in left.items() if device in right)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def _choose(kernels: Iterable[bool]) -> None:
    for (_, enable), enabled in zip(_KERNELS, kernels, strict=True):
        enable(enabled)

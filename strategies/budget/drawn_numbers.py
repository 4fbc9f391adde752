"""Random numbers of one operator: the state of its generator, put back where it runs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from strategies.estimate.tensors import tensors_in

Stash: TypeAlias = Callable[[], Callable[[], None]]
"""Puts a generator into the state of forward; what it returns puts it back as it was."""


def stash_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stash:
    """Return the state of the generator that a call draws from: its own, or that of its device."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return partial(_put, generator.get_state, generator.set_state, generator.get_state())
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    device = torch.device(kwargs.get("device") or "cpu") if device is None else device
    if device.type == "cpu":
        return partial(_put, _cpu_state, torch.set_rng_state, torch.get_rng_state())
    module = torch.get_device_module(device.type)
    read, write = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    return partial(_put, read, write, read())


def _cpu_state() -> Tensor:
    return torch.get_rng_state()  # looked up when it is called: meters watch the name


def _put(read: Callable[[], Tensor], write: Callable[[Tensor], object], state: Tensor) -> Callable[[], None]:
    before = read()
    write(state)
    return partial(_write, write, before)


def _write(write: Callable[[Tensor], object], state: Tensor) -> None:
    write(state)

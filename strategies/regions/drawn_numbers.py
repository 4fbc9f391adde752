"""Random numbers of one operator: the state of its generator, put back where it runs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from strategies.estimate.tensors import tensors_in

Stash: TypeAlias = Callable[[], Callable[[], None]]
"""Puts a generator into the state of forward; what it returns puts it back as it was."""


def stash_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stash:
    """Return the state of the generator that a call draws from: its own, or that of its device."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return partial(_put, generator.get_state, generator.set_state, generator.get_state())
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    return _stash_on(torch.device(kwargs.get("device") or "cpu") if device is None else device)


class DrawWatch:
    """Finds out whether a call of an operator draws random numbers, which its tags do not tell.

    Watched are the generators of the CPU and of the operands' devices. Make it before the call.

    Args:
        args, kwargs: what the operator is called with.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        others = {tensor.device for tensor in tensors_in((args, kwargs))} - {_CPU}
        devices = [_CPU, *(device for device in others if device.type != "meta")]
        self._before = [(generator, generator.get_state()) for generator in map(_generator_of, devices)]

    def has_drawn(self) -> bool:
        """Say whether a generator has moved since."""
        return any(_is_moved(generator, before) for generator, before in self._before)

    def stash(self) -> Stash | None:
        """Return the states before the call of the generators that have moved; `None` where none has."""
        stashes = []
        for generator, before in self._before:
            if _is_moved(generator, before):
                after = generator.get_state()
                generator.set_state(before)
                stashes.append(_stash_on(generator.device))
                generator.set_state(after)
        return partial(_put_all, stashes) if stashes else None


_CPU = torch.device("cpu")


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def _is_moved(generator: torch.Generator, before: Tensor) -> bool:
    with _disable_current_modes():
        return not torch.equal(generator.get_state(), before)


def _put_all(stashes: Sequence[Stash]) -> Callable[[], None]:
    return partial(_call_all, [stash() for stash in stashes])


def _call_all(put_back: Sequence[Callable[[], None]]) -> None:
    for each in put_back:
        each()


def _stash_on(device: torch.device) -> Stash:
    """Return the state of the generator of a device."""
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

"""An error of one of the two models that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.errors import ConfigError


class PassError(Exception):
    """A pass of one of the two models raised.

    Fields:
        phase: `forward`, `backward` or `update`.
        error: what it raised, with the block where a recomputation did.
        is_variant: the variant's pass, not the plain model's.
    """

    def __init__(self, phase: str, error: Exception, *, is_variant: bool) -> None:
        super().__init__(phase, error)
        self.phase = phase
        self.error = error
        self.is_variant = is_variant


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """The error of a rank, in a form that other ranks can be told.

    Fields:
        phase: the pass that raised, as of `PassError`; `None` where it was no pass.
        is_too_large: the rank is out of memory.
    """

    rank: int
    said: str
    phase: str | None = None
    is_variant: bool = False
    is_too_large: bool = False

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> Raised:
        """Tell of `error`."""
        is_too_large = isinstance(error, torch.OutOfMemoryError)
        if not isinstance(error, PassError):
            return cls(rank=rank, said=f"{type(error).__name__}: {error}", is_too_large=is_too_large)
        said = f"{type(error.error).__name__}: {error.error}"
        return cls(rank=rank, said=said, phase=error.phase, is_variant=error.is_variant)


@contextmanager
def told(phase: str, *, is_variant: bool) -> Iterator[None]:
    """Say of which model and phase an error is; what no model is to blame for stays as it is.

    Raises:
        PassError: anything else was raised within the scope.
    """
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PassError(phase, error, is_variant=is_variant) from error

"""Arguments of a check, refused where no comparison can be made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from harness.errors import ConfigError, require_at_least
from strategies import Strategy, Tolerance, ac_variants, chunk_variants

_COMPUTED = (torch.bfloat16, torch.float16)
_HELD = (*_COMPUTED, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """In which dtypes forward and loss of both models run.

    Fields:
        autocast: dtype of `torch.autocast` around forward and loss, and around nothing else; `None` for none.
        dtype: dtype of the models' floating-point parameters and buffers, and of floating-point inputs;
            `None` leaves each as it is.
        caches: autocast keeps the weights that it has cast, within one scope.
    """

    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    caches: bool = True

    def __post_init__(self) -> None:
        _require_dtype("autocast", self.autocast, _COMPUTED)
        _require_dtype("dtype", self.dtype, _HELD)

    def computed(self, device: torch.device) -> torch.autocast:
        """Return the scope of a forward and its loss on `device`."""
        is_on = self.autocast is not None
        dtype = self.autocast or torch.bfloat16
        return torch.autocast(device.type, dtype=dtype, enabled=is_on, cache_enabled=self.caches)

    def cast(self, model: nn.Module) -> nn.Module:
        """Return `model` in `dtype`."""
        return model if self.dtype is None else model.to(self.dtype)

    def cast_inputs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input in `dtype`."""
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(self.dtype).requires_grad_(tensor.requires_grad)


def require_arguments(
    make: object, variant: object, loss_fn: object, steps: object, tolerance: object
) -> None:
    """Refuse arguments that are of another kind than documented, and a scope that changes what training is.

    Raises:
        ConfigError: one of them is; the message says what would be right.
    """
    _require_make(make)
    _require_variant(variant)
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError("loss_fn", f"must be a function of the outputs, got {_kind(loss_fn)}")
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise ConfigError("steps", f"must be a whole number, got {steps!r}")
    require_at_least("steps", steps, 1)
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise ConfigError("tolerance", f"must be a strategies.Tolerance, got {tolerance!r}")
    if torch.is_inference_mode_enabled():
        problem = "the check is called within torch.inference_mode(), whose tensors take no gradient"
        raise ConfigError("make", f"{problem}; call it outside")
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            raise ConfigError(
                "autocast",
                f"the check is called within torch.autocast({device!r}, {dtype}), which would reach backward "
                f"and optimizer too; call it outside, with autocast={dtype}",
            )


def _require_make(make: object) -> None:
    if isinstance(make, nn.Module):
        problem = f"must be a function that returns a fresh model, got an instance of {type(make).__name__}"
        remedy = "pass the function that builds it, or lambda: copy.deepcopy(model)"
        raise ConfigError("make", f"{problem}; {remedy}")
    if not callable(make):
        raise ConfigError("make", f"must be a function that returns a fresh model, got {_kind(make)}")


def _require_variant(variant: object) -> None:
    shape = "must be a strategy, or a function that takes the model"
    if isinstance(variant, nn.Module):
        problem = f"{shape}, got an instance of {type(variant).__name__}"
        raise ConfigError("variant", f"{problem}; pass a function that makes it of the plain model")
    if isinstance(variant, type) and issubclass(variant, Strategy):
        problem = f"{shape}, got the class {variant.__name__}"
        raise ConfigError("variant", f"{problem}; pass {_call_of(variant)}")
    if callable(variant) or isinstance(variant, Strategy):
        return
    named = {**chunk_variants, **ac_variants}.get(variant) if isinstance(variant, str) else None
    remedy = "" if named is None else f"; pass {_call_of(named)} of {named.__module__}"
    raise ConfigError("variant", f"{shape}, got {variant!r}{remedy}")


def _call_of(strategy: type[Strategy]) -> str:
    """Return how a strategy is made, with the path of the blocks where it takes one."""
    fields = getattr(strategy, "__dataclass_fields__", {})
    return f"{strategy.__name__}({'layers_fqn=…' if 'layers_fqn' in fields else '…' if fields else ''})"


def _require_dtype(where: str, dtype: object, known: tuple[torch.dtype, ...]) -> None:
    if dtype is None or dtype in known:
        return
    names = ", ".join(map(str, known))
    raise ConfigError(where, f"must be one of {names}, got {dtype!r}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:60]

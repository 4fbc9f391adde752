"""`ac=python`: what a function of the user's does to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from strategies import user_sources
from strategies.base import Strategy, StrategyError, check_simple_fields
from strategies.estimate import global_state
from strategies.regions import region, torch_wrappers
from strategies.user_function import UserFunction

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Python(Strategy):
    """Do what a function of the user's does, such as what a trainer switches on.

    Use when: one's own checkpointing, or that of a library, is to be compared with ours.

    Saved: what the function keeps.
    Recomputed: what the function runs again.
    Moved: what the function moves.

    Fields:
        factory: `package.module:function`, importable, or below the current folder.
            `function(model, **kwargs)` returns the model to use, or changes it in place.
        kwargs: further arguments of the function, by name; null for none.
        digest: start of the SHA-256 of its module and of the user's modules that this imports, which tells
            trials of one name apart; `None`: as they are now.
    """

    is_given: ClassVar[bool] = True

    factory: str = ""
    kwargs: dict[str, Any] | None = field(default=None, hash=False)
    digest: str | None = None

    def __post_init__(self) -> None:
        """Refuse what names no function, and arguments without names."""
        check_simple_fields("ac", self)
        if not self.factory:
            raise StrategyError("ac.factory", "is empty; give package.module:function, a function of a model")
        if not isinstance(self.kwargs, Mapping | None):
            raise StrategyError("ac.kwargs", f"must be a mapping or null, got {self.kwargs!r}")
        self._user().check_name()
        found = user_sources.digest_of(self.factory.partition(":")[0])
        if self.digest not in (None, found):
            problem = f"is {self.digest!r}, and {self.factory!r} has {found!r}"
            raise StrategyError("ac.digest", f"{problem}; its files have changed, or leave the digest out")
        object.__setattr__(self, "digest", found)

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (the function takes none)
        """Return what the function makes of `model`.

        Raises:
            StrategyError: the function cannot be imported or called, or it returns no module; its module has
                other parameters or buffers; it changes a class or a setting of torch, which the twin shares;
                this model is checkpointed already.
        """
        region.refuse_enclosed(model)
        before = _tensors(model)
        # files of torch whose functions libraries replace
        files = (torch.nn.functional, torch.utils.checkpoint)
        outside = global_state.GlobalState(model, files)
        try:
            changed = self._called(model)
        finally:
            left = outside.put_back()
        if left:
            problem = f"{self.factory!r} changes {', '.join(left)}, which the plain model would have too"
            raise StrategyError("ac.factory", f"{problem}; change the modules of the model that it is given")
        result = model if changed is None else changed
        if not isinstance(result, torch.nn.Module):
            problem = f"{self.factory!r} returned {type(result).__name__}"
            raise StrategyError("ac.factory", f"{problem}; return the model, or change it and return nothing")
        result = torch_wrappers.as_regions(result)
        self._refuse_another(before, _tensors(result))
        region.mark(result)
        return result

    def _called(self, model: nn.Module) -> Any:
        """Return what the function returns."""
        user, arguments = self._user(), dict(self.kwargs or {})
        function = user.load()
        user.check_arguments(function, arguments)
        return user.call(function, model, **arguments)

    def runs_user_code(self) -> bool:
        """Return true."""
        return True

    def _user(self) -> UserFunction:
        return UserFunction(name=self.factory, group="ac", given=1)

    def _refuse_another(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
        """Refuse a model that has not the parameters and buffers of the given one, under their names.

        Raises:
            StrategyError: naming the first.
        """
        remedy = "checkpointing leaves parameters and buffers, and their names, as they are"
        for name in (*before, *after):
            if after.get(name) is before.get(name):
                continue
            if name not in after:
                problem = f"{self.factory!r} returned a model without {name!r}"
            elif name not in before:
                problem = f"{self.factory!r} returned a model with {name!r}, which the given one has not"
            else:
                problem = f"{self.factory!r} returned a model whose {name!r} is another tensor"
            raise StrategyError("ac.factory", f"{problem}; {remedy}")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by the names that it has for them."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for of_kind in (module._parameters, module._buffers)  # noqa: SLF001 (named_parameters leaves ties out)
        for name, tensor in of_kind.items()
        if tensor is not None
    }

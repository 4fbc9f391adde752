"""The part that variants by others' code share: their code is called, and its result looked at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from strategies.base import Strategy, StrategyError, check_simple_fields
from strategies.estimate import global_state
from strategies.last_words import last_words
from strategies.regions import blocks, region, torch_wrappers

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign(Strategy):
    """A variant that others' code carries out."""

    needs_instructions: ClassVar[bool] = True

    @property
    def source(self) -> tuple[str, str]:
        """The option that chooses the code, and what messages call the code."""
        raise NotImplementedError

    def changed(self, model: nn.Module) -> Any:
        """Return what the code returns for `model`: a model, or `None` where it changed this one."""
        raise NotImplementedError

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (the code takes none)
        """Return what the code makes of `model`.

        Raises:
            StrategyError: the code cannot be called, or it returns no module; its module has other parameters
                or buffers; it changes a class or a setting of torch, which the twin shares; this model is
                checkpointed already.
        """
        where, name = self.source
        region.refuse_enclosed(model)
        before = _tensors(model)
        # files of torch whose functions libraries replace
        files = (torch.nn.functional, torch.utils.checkpoint)
        outside = global_state.GlobalState(model, files)
        try:
            changed = self.changed(model)
        finally:
            left = outside.put_back()
        if left:
            problem = f"{name} changes {', '.join(left)}, which the plain model would have too"
            raise StrategyError(where, f"{problem}; change the modules of the model that it is given")
        result = model if changed is None else changed
        if not isinstance(result, torch.nn.Module):
            problem = f"{name} returned {type(result).__name__}"
            raise StrategyError(where, f"{problem}; return the model, or change it and return nothing")
        result = torch_wrappers.as_regions(result)
        self._refuse_another(before, _tensors(result))
        region.mark(result)
        return result

    def _refuse_another(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
        """Refuse a model that has not the parameters and buffers of the given one, under their names.

        Raises:
            StrategyError: naming the first.
        """
        remedy = "checkpointing leaves parameters and buffers, and their names, as they are"
        where, code = self.source
        for name in (*before, *after):
            if after.get(name) is before.get(name):
                continue
            if name not in after:
                problem = f"{code} returned a model without {name!r}"
            elif name not in before:
                problem = f"{code} returned a model with {name!r}, which the given one has not"
            else:
                problem = f"{code} returned a model whose {name!r} is another tensor"
            raise StrategyError(where, f"{problem}; {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfLibrary(Foreign):
    """A variant that a library switches on, by its own functions.

    `strategies.foreign.<package>_calls` imports the library, and calls it with the fields of the variant.
    """

    package: ClassVar[str]
    installs: ClassVar[str]
    """The words of pip that install it."""

    def __post_init__(self) -> None:
        """Refuse values of other types than declared, and a missing package."""
        check_simple_fields("ac", self)
        if find_spec(self.package) is None:
            problem = f"{self.package} is not installed: pip install {self.installs}"
            raise StrategyError("ac", problem)

    @property
    def source(self) -> tuple[str, str]:
        """The group, and the name of the library."""
        return "ac", self.package

    def changed(self, model: nn.Module) -> Any:
        """Return what the library makes of `model`.

        Raises:
            StrategyError: it cannot be imported, or raises.
        """
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            with redirect_stdout(sys.stderr):  # where DeepSpeed looks for an accelerator it prints
                calls = import_module(f"strategies.foreign.{self.package}_calls")
            return calls.switch_on(model, **options)
        except (StrategyError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            words = last_words(error)
            raise StrategyError("ac", f"{self.package} raised {words.kind}: {words.message}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class OfBlocks(OfLibrary):
    """A variant of a library whose functions are called with blocks, which have to be there.

    Fields:
        layers_fqn: FQN of the container (ModuleList, ModuleDict, Sequential) whose children are the blocks.
    """

    layers_fqn: str = ""

    def changed(self, model: nn.Module) -> Any:
        """Return what the library makes of `model`.

        Raises:
            StrategyError: there are no such blocks, or the library raises.
        """
        blocks.names_of_children(model, self.layers_fqn)
        return OfLibrary.changed(self, model)


def refuse_without_accelerator(option: str, doing: str) -> None:
    """Refuse an option that only works next to an accelerator, where torch finds none.

    Args:
        option: the option of `ac`.
        doing: what the library does, in words.

    Raises:
        StrategyError: there is none.
    """
    if torch.accelerator.is_available():
        return
    problem = (
        f"{doing}, which raises where torch finds no accelerator; use ac=offload or ac=full ac.offload=true"
    )
    raise StrategyError(f"ac.{option}", problem)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for of_kind in (module._parameters, module._buffers)  # noqa: SLF001 (named_parameters leaves ties out)
        for name, tensor in of_kind.items()
        if tensor is not None
    }

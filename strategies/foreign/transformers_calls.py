"""The switch of `transformers` for activation checkpointing; needs the extra `acbench[hf]`."""

from __future__ import annotations

from inspect import signature

import transformers
from torch import nn
from transformers import PreTrainedModel

from strategies.base import StrategyError
from strategies.foreign.variant import refuse_without_accelerator


def switch_on(model: nn.Module, *, every_n_layers: int, offload: bool, use_reentrant: bool) -> None:
    """Call the switch of a model of `transformers`.

    Raises:
        StrategyError: the model is none of transformers, or this release lacks an option.
    """
    checked = of_transformers(model)
    # releases before 5.16 have the older name alone, which 5.16 deprecates
    enable = getattr(checked, "activation_checkpointing_enable", checked.gradient_checkpointing_enable)
    wanted = {"every_n_layers": every_n_layers, "offload": offload}
    options = {name: value for name, value in wanted.items() if value != _USUAL[name]}
    missing = next((name for name in options if name not in signature(enable).parameters), None)
    if missing is not None:
        problem = f"transformers {transformers.__version__} has no such option"
        raise StrategyError(f"ac.{missing}", f"{problem}; pip install -U transformers")
    if offload:
        refuse_without_accelerator("offload", "transformers copies to pinned memory")
    enable({"use_reentrant": use_reentrant}, **options)


def of_transformers(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers that `model` is, or holds as models with adapters do.

    Raises:
        StrategyError: it holds none.
    """
    found = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if found is not None:
        return found
    problem = f"transformers switches it on in models of its own, and {type(model).__name__} is none"
    raise StrategyError("ac", f"{problem}; use model=hf, or ac=full")


_USUAL = {"every_n_layers": 1, "offload": False}

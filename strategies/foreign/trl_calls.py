"""Selective checkpointing and offloading of TRL; needs the extra `acbench[trl]`."""

from __future__ import annotations

import warnings

from torch import nn
from trl.models import enable_selective_activation_checkpointing, get_act_offloading_ctx_manager

from strategies.foreign.transformers_calls import of_transformers
from strategies.foreign.variant import refuse_without_accelerator
from strategies.regions import region


def switch_on(
    model: nn.Module, *, gradient_checkpointing: bool, selective: bool, activation_offloading: bool
) -> None:
    """Do to a model what `SFTTrainer` does before it trains.

    Raises:
        StrategyError: the model is none of transformers, or offloading finds no accelerator.
    """
    checked = of_transformers(model)
    if gradient_checkpointing:
        if selective:
            enable_selective_activation_checkpointing(checked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TRL calls the older name of the switch
            checked.activation_checkpointing_enable({"use_reentrant": False})
    if activation_offloading:
        refuse_without_accelerator("activation_offloading", "trl copies from the accelerator")
        region.enclose(model, region.InScope(scope=get_act_offloading_ctx_manager(model=model)))

"""Activation checkpointing of accelerate's FSDP2 plugin; needs the extra `acbench[accelerate]`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch import nn


def switch_on(
    model: nn.Module,
    *,
    transformer_cls_names_to_wrap: tuple[str, ...],
    activation_checkpointing_offload: bool,
) -> Any:
    """Return the model with the wrappers that `Accelerator.prepare` puts around layers before it shards."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        activation_checkpointing_offload=activation_checkpointing_offload,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[*transformer_cls_names_to_wrap] or None,
    )
    plugin.set_auto_wrap_policy(model)
    return fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)

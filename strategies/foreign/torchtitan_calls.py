"""The policies of torchtitan; needs the extra `acbench[torchtitan]`."""

from __future__ import annotations

import torch
from torch import nn
from torchtitan.distributed import activation_checkpoint as titan

from strategies.regions import blocks


def switch_on(
    model: nn.Module,
    *,
    layers_fqn: str,
    policy: str,
    preserve_rng_state: bool,
    force_recompute_mm_shapes_by_fqns: tuple[str, ...],
) -> None:
    """Let a policy of torchtitan wrap the blocks of a container, under the name that it looks for."""
    holder = nn.Module()
    container, holder.layers = blocks.container_at(model, layers_fqn), nn.Module()
    for fqn, block in blocks.children_of(model, layers_fqn).items():
        holder.layers.register_module(fqn.rpartition(".")[2], block)
    if policy == "full":
        full = titan.FullAC.Config(preserve_rng_state=preserve_rng_state)
        titan.FullAC(full).apply(holder)
    else:
        names = [*force_recompute_mm_shapes_by_fqns]
        selective = titan.SelectiveAC.Config(
            preserve_rng_state=preserve_rng_state, force_recompute_mm_shapes_by_fqns=names
        )
        titan.SelectiveAC(selective).apply(holder)
    for name, wrapped in holder.layers.named_children():
        container.register_module(name, wrapped)
    # the policies switch this off for the whole process, for the sake of compiled pipelines
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)

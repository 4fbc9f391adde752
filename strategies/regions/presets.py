"""Names of operators for selective-op AC: semantic groups, presets, and what can be refused by name alone.

No torch here: which of them this build of torch has, `strategies.regions.operator_names` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.base import StrategyError

GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm.default", "aten.mm.dtype", "aten.addmm.default", "aten.addmm.dtype", "aten.bmm.default",
        "aten.bmm.dtype", "aten.linear.default", "aten._scaled_mm.default", "aten._scaled_mm_v2.default",
        "aten._grouped_mm.default", "aten._scaled_grouped_mm.default", "aten._scaled_grouped_mm_v2.default",
    ),
    "conv": (
        "aten.convolution.default", "aten.convolution_overrideable.default", "aten._convolution.default",
        "aten.mkldnn_convolution.default", "aten.cudnn_convolution.default",
        "aten.miopen_convolution.default",
    ),
    "attention": (
        "aten.scaled_dot_product_attention.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_attention_math_for_mps.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention.quantized",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._flash_attention_forward.default", "aten._flash_attention_forward.quantized",
        "aten._efficient_attention_forward.default", "aten._cudnn_attention_forward.default",
        "torch_attn._varlen_attn.default", "higher_order.flex_attention",
    ),
    "comm": (
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.all_gather_into_tensor_coalesced.default",
        "_c10d_functional.all_reduce.default", "_c10d_functional.all_reduce_coalesced.default",
        "_c10d_functional.all_to_all_single.default", "_c10d_functional.broadcast.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.reduce_scatter_tensor_coalesced.default",
    ),
    "max": ("aten.max.default", "aten.max.dim"),
    "topk": ("aten.topk.default",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A save list as another project ships it.

    Fields:
        operators: names of overloads; those this build of torch lacks never fire.
        counted: the matmuls among them that `recompute_every` counts.
        recompute_every: every how many counted matmuls one is recomputed; 0 is never.
    """

    operators: tuple[str, ...]
    counted: tuple[str, ...]
    recompute_every: int


PRESETS: Mapping[str, Preset] = {
    # SAVE_DICT of https://github.com/Modalities/modalities, activation checkpointing module, whose policy
    # recomputes every second mm
    "modalities": Preset(
        operators=(
            "aten.mm.default", "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_flash_attention.default",
            "_c10d_functional.reduce_scatter_tensor.default", "aten.max.default",
        ),
        counted=("aten.mm.default",), recompute_every=2,
    ),
    # https://github.com/pytorch/torchtitan, distributed/activation_checkpoint.py: the compute-intensive
    # operators of torch's partitioner, and what torchtitan adds; it counts mm and linear, never addmm
    "torchtitan": Preset(
        operators=(
            "aten.mm.default", "aten.mm.dtype", "aten.linear.default", "aten.addmm.default",
            "aten.bmm.default", "aten._scaled_mm.default", "aten.convolution.default",
            "aten.convolution_backward.default", "aten.upsample_bilinear2d.default",
            "aten._flash_attention_forward.default", "aten._efficient_attention_forward.default",
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_cudnn_attention.default",
            "aten._scaled_dot_product_attention_math.default",
            "aten._scaled_dot_product_fused_attention_overrideable.default",
            "torch_attn._varlen_attn.default", "higher_order.flex_attention",
            "higher_order.inductor_compiled_code", "aten.max.default", "aten.topk.default",
            "_c10d_functional.reduce_scatter_tensor.default", "_c10d_functional.all_to_all_single.default",
        ),
        counted=("aten.mm.default", "aten.mm.dtype", "aten.linear.default"), recompute_every=2,
    ),
}  # fmt: skip


def check_names(save_ops: str | tuple[str, ...], matmul_recompute_every: int | None) -> None:
    """Refuse what is wrong whatever operators this build of torch has.

    Args:
        save_ops: name of a preset, or names of groups and overloads.
        matmul_recompute_every: 0 never, k >= 2 every k-th saved matmul; `None` as the preset says, else 0.

    Raises:
        StrategyError: no such preset, an empty list, every matmul recomputed, or a count where all names are
            groups and none of them has a matmul.
    """
    if isinstance(save_ops, str):
        _check_preset(save_ops)
    elif not save_ops:
        problem = "is empty, which is full AC"
        raise StrategyError("ac.save_ops", f"{problem}; use ac=full, or name some of {', '.join(GROUPS)}")
    has_matmul = isinstance(save_ops, str) or "matmul" in save_ops or not is_known(save_ops)
    check_count(matmul_recompute_every or 0, has_matmul=has_matmul)


def is_known(save_ops: str | tuple[str, ...]) -> bool:
    """Return whether `save_ops` is a preset or names groups only, so that no operator has to be looked up."""
    return isinstance(save_ops, str) or all(name in GROUPS for name in save_ops)


def check_count(every: int, *, has_matmul: bool) -> None:
    """Refuse a `matmul_recompute_every` that means nothing.

    Args:
        every: the value, 0 where none was given.
        has_matmul: whether the saved operators hold a matmul that can be counted.
    """
    where = "ac.matmul_recompute_every"
    if every < 0:
        raise StrategyError(where, f"must be 0 (never) or at least 2, got {every}")
    if every == 1:
        problem = "must be 0 (never) or at least 2, got 1"
        raise StrategyError(where, f"{problem}; to recompute every matmul use ac=full")
    if every and not has_matmul:
        raise StrategyError(where, f"is {every}, but ac.save_ops names no matmul; add matmul, or use 0")


def _check_preset(name: str) -> None:
    """Refuse a word that is no preset, with what it may have meant."""
    if name in PRESETS:
        return
    remedy = f"write the list [{name}]" if name in GROUPS or "." in name else "write a list of names"
    problem = f"{name!r} is no preset"
    raise StrategyError("ac.save_ops", f"{problem}; presets are: {', '.join(PRESETS)}; otherwise {remedy}")

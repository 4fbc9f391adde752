"""What other estimators of training memory say of a point: formulas by their publications, and a tracker.

Each takes what it is made for and no more; the sources are those of the releases that are named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from harness.experiment.experiment import Experiment
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.steps import train, warm_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A decoder and its step, as formulas take them.

    Fields:
        parameters: elements of parameters.
        layers, width, heads, hidden_width, vocab_size: L, D, H, F, V.
        is_tied: whether embedding and head are one matrix.
        is_gated: whether the feed-forward has a gate.
        batch_size, sequence_length: B, S of one rank.
        is_bf16: parameters and activations in bfloat16.
        ac: variant of activation checkpointing.
    """

    parameters: int
    layers: int
    width: int
    heads: int
    hidden_width: int
    vocab_size: int
    is_tied: bool
    is_gated: bool
    batch_size: int
    sequence_length: int
    is_bf16: bool
    ac: str


def accelerate(sizes: Sizes) -> int:
    """Return the highest of model, gradients, optimizer and step, for Adam and batch size 1.

    Source: accelerate 1.15.0, commands/estimate.py, `estimate_training_usage`.
    """
    fp32_bytes = 4 * sizes.parameters
    return 2 * fp32_bytes if sizes.is_bf16 else 4 * fp32_bytes


def megatron_bridge(sizes: Sizes) -> int:
    """Return weights, optimizer and activations on one rank, under selective recomputation.

    18 bytes a parameter (bf16 with fp32 gradients and Adam). The formula takes sequence parallelism and flash
    attention for granted: `L*B*S*D*(18 + 4F/D)` and what stands before and behind the layers.

    Source: megatron-bridge 0.3.1, training/utils/theoretical_memory_utils.py; Korthikanti et al. 2022,
    arXiv:2205.05198, table 2.
    """
    tokens = sizes.batch_size * sizes.sequence_length
    gated = 1.5 if sizes.is_gated else 1.0
    ratio = sizes.hidden_width / sizes.width
    layers = 2 * sizes.layers * sizes.width**2 * (2 + ratio * gated + 2 / sizes.width)
    embeddings = sizes.width * sizes.vocab_size * (1 if sizes.is_tied else 2)
    parameters = layers + 2 * sizes.width + embeddings
    activations = tokens * sizes.width * (18 + 4 * ratio) * sizes.layers
    ends = tokens * (8 + sizes.width + 4 * sizes.width * (1 + sizes.vocab_size / sizes.width))
    return int(18 * parameters + activations + ends)


def has_fitcheck() -> bool:
    """Return whether `fitcheck-llm` is installed."""
    return importlib.util.find_spec("fitcheck") is not None


def fitcheck(sizes: Sizes) -> int:
    """Return what FitCheck says of full fine-tuning, without the overhead of a CUDA process."""
    parts = (importlib.import_module(f"fitcheck.{name}") for name in ("config_parser", "estimator", "gpu_db"))
    configs, estimator, devices = parts
    model = configs.ModelConfig(
        name="holdout",
        num_params=sizes.parameters,
        hidden_size=sizes.width,
        num_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        intermediate_size=sizes.hidden_width,
        vocab_size=sizes.vocab_size,
        head_dim=sizes.width // sizes.heads,
        tie_word_embeddings=sizes.is_tied,
    )
    training = estimator.TrainingConfig(
        precision="bf16" if sizes.is_bf16 else "fp32",
        optimizer_dtype="bf16" if sizes.is_bf16 else "fp32",
        batch_size=sizes.batch_size,
        seq_len=sizes.sequence_length,
        lora_rank=None,
        grad_checkpoint=sizes.ac == "full",
        flash_attn=True,
    )
    found = estimator.estimate(model, training, devices.GPU_DB["a100-80"])
    return int((found.total_mib - found.overhead_mib) * (1 << 20))


FORMULAS: Mapping[str, tuple[Callable[[Sizes], int], tuple[str, ...]]] = {
    "accelerate": (accelerate, ("none",)),
    "FitCheck": (fitcheck, ("none", "full")),
    "Megatron-Bridge": (megatron_bridge, ("selective_op",)),
}
"""Formulas by the tool's name, and the variants that they are made for."""


def mem_tracker(experiment: Experiment) -> int:
    """Return the peak that `torch.distributed._tools.MemTracker` finds as the step really runs here."""
    device = torch.device("cpu")
    batch = batches(experiment, device, 0)
    trainee = assemble(experiment, device, None, batch(0))
    warm_up(trainee, batch)
    tracker, given = MemTracker(), batch(2)
    tracker.track_external(trainee.model, trainee.optimizer, *given.inputs)
    with tracker:
        train(trainee, given)
    peak: int = tracker.get_tracker_snapshot("peak")[device]["Total"]
    return peak

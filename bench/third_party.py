"""Models of other people under a chunk plan for half of their bytes, compared with the plain model.

Each architecture is small, with random weights, and trained for a step (`--forward`: a forward without
gradients). A plan for half of its activations is sought, applied to a copy and run. Bytes are those of the
project's meter. Libraries that are not installed are said, and left out.

    python -m bench.third_party [--forward] [--matching Llama] [--fraction 0.5]
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.chunk_attempt import PlannedPass
from bench.output import parser, publish
from bench.table import table_of
from harness.models.base import Batch
from strategies.base import PlannedStep
from strategies.errors import StrategyError

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers")
"""Whose models are sought."""

TOLERANCE = 1e-3
"""Relative difference that a chunk variant declares."""

NEARLY = 0.01
"""Share by which a prediction may differ from what is measured."""

_BATCH, _TOKENS, _VOCABULARY, _PIXELS = 2, 64, 64, 32
_NARROW = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
_TEXT = {**_NARROW, "vocab_size": _VOCABULARY, "max_position_embeddings": 128}
_MOE = {**_TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": _VOCABULARY}
_PICTURE = {**_NARROW, "image_size": _PIXELS, "patch_size": 4}
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LlamaConfig": ("CausalLM", _TEXT),
    "MistralConfig": ("CausalLM", _TEXT | {"num_key_value_heads": 2}),
    "Qwen2Config": ("CausalLM", _TEXT),
    "Qwen3Config": ("CausalLM", _TEXT | {"head_dim": 8}),
    "GemmaConfig": ("CausalLM", _TEXT | {"head_dim": 8}),
    "Gemma2Config": ("CausalLM", _TEXT | {"head_dim": 8}),
    "PhiConfig": ("CausalLM", _TEXT),
    "Phi3Config": ("CausalLM", _TEXT | {"pad_token_id": 0}),
    "StableLmConfig": ("CausalLM", _TEXT),
    "Olmo2Config": ("CausalLM", _TEXT | {"pad_token_id": 0}),
    "GPTNeoXConfig": ("CausalLM", _TEXT),
    "FalconConfig": ("CausalLM", _TEXT),
    "GPT2Config": ("CausalLM", _GPT),
    "GPTJConfig": ("CausalLM", _GPT | {"rotary_dim": 8}),
    "BloomConfig": ("CausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": _VOCABULARY}),
    "OPTConfig": ("CausalLM", _TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "MixtralConfig": ("CausalLM", _TEXT | {"num_local_experts": 4}),
    "Qwen3MoeConfig": ("CausalLM", _MOE | {"num_experts": 4, "head_dim": 8}),
    "DeepseekV3Config": (
        "CausalLM",
        _MOE | _LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "BertConfig": ("MaskedLM", _TEXT),
    "RobertaConfig": ("MaskedLM", _TEXT),
    "ElectraConfig": ("MaskedLM", _TEXT | {"embedding_size": 32}),
    "DebertaV2Config": ("MaskedLM", _TEXT),
    "DistilBertConfig": ("MaskedLM", {"dim": 32, "n_heads": 4, "n_layers": 2, "vocab_size": _VOCABULARY}),
    "T5Config": (
        "Seq2SeqLM",
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": _VOCABULARY},
    ),
    "BartConfig": (
        "Seq2SeqLM",
        {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "vocab_size": _VOCABULARY,
        },
    ),
    "ViTConfig": ("ImageClassification", _PICTURE),
    "DeiTConfig": ("ImageClassification", _PICTURE),
    "BeitConfig": ("ImageClassification", _PICTURE),
    "SwinConfig": (
        "ImageClassification",
        {"image_size": _PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 4},
    ),
    "ConvNextConfig": (
        "ImageClassification", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 2},
    ),
    "ResNetConfig": (
        "ImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    ),
    "SegformerConfig": (
        "SemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
         "decoder_hidden_size": 16},
    ),
}  # fmt: skip
"""Configuration classes of `transformers`: the head, and sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What became of one architecture.

    Fields:
        outcome: `planned`, `refused` by name, or `crashed`.
        sentence: of a refusal or a crash.
        unchunked_bytes: measured activation peak as it is.
        predicted_share, measured_share: of that, under the plan.
        relative_difference: of the results, as `bench.chunking` has it.
    """

    architecture: str
    outcome: str
    sentence: str = ""
    fraction: float
    unchunked_bytes: int | None = None
    predicted_share: float | None = None
    measured_share: float | None = None
    relative_difference: float | None = None
    planning_s: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the measured bytes are within the budget and nearly those that were predicted."""
        if self.measured_share is None or self.predicted_share is None:
            return True
        is_near = abs(self.predicted_share - self.measured_share) <= NEARLY * self.measured_share
        return self.measured_share <= self.fraction and is_near

    @property
    def is_equal(self) -> bool:
        """Whether the results are those of the plain model."""
        difference = self.relative_difference
        return self.outcome != "planned" or (difference is not None and difference <= TOLERANCE)

    @property
    def is_right(self) -> bool:
        """Whether it is planned as claimed, or refused."""
        return self.outcome != "crashed" and self.is_kept and self.is_equal


class Positional(nn.Module):
    """A model of `transformers` with its inputs by position, which returns tensors alone."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the logits."""
        outputs: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=False)[0]
        return outputs


def main() -> int:
    """Plan all architectures, print the table, write the JSON; return 1 where one is not right."""
    made = parser(__doc__, "third_party")
    made.add_argument("--forward", action="store_true", help="plan a forward without gradients")
    made.add_argument("--matching", default="", help="only architectures whose name contains this")
    made.add_argument("--fraction", type=float, default=0.5, help="budget / bytes as it is")
    chosen = made.parse_args()
    torch.set_num_threads(1)
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    names = [name for name in ARCHITECTURES if chosen.matching in name]
    if "transformers" in missing:
        names = []
    rows = list(planned(names, fraction=chosen.fraction, training=not chosen.forward))
    publish(
        Group(_table(rows), f"planned: {sum(row.outcome == 'planned' for row in rows)} of {len(rows)}",
              f"not installed: {', '.join(missing) or 'none'}"),
        chosen.out,
        protocol={
            "architectures": names,
            "fraction": chosen.fraction,
            "training": not chosen.forward,
            "tolerance": TOLERANCE,
            "missing": missing,
        },
        results=[asdict(row) for row in rows],
    )  # fmt: skip
    return int(not all(row.is_right for row in rows))


def planned(names: Sequence[str], *, fraction: float, training: bool) -> Iterator[Planned]:
    """Yield what becomes of each architecture."""
    for name in names:
        row = Planned(architecture=name, outcome="refused", fraction=fraction)
        try:
            yield _attempt(row, training=training)
        except StrategyError as refusal:
            yield replace(row, sentence=str(refusal))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            yield replace(row, outcome="crashed", sentence=f"{type(error).__name__}: {error}")


def _attempt(row: Planned, *, training: bool) -> Planned:
    model, batch = _model_of(row.architecture)
    step = PlannedStep(loss=_loss) if training else None
    case = PlannedPass.of(model.train(training), batch, step)
    started_s = time.perf_counter()
    fields, chunked = case.attempt(case.planning(), row.fraction, started_s=started_s, is_timed=False)
    unchunked = fields["unchunked_bytes"]
    if chunked is None:
        share = fields["minimum_bytes"] / unchunked
        return replace(row, unchunked_bytes=unchunked, sentence=f"the smallest peak is {share:.0%} of it")
    return replace(
        row,
        outcome="planned",
        unchunked_bytes=unchunked,
        predicted_share=fields["predicted_bytes"] / unchunked,
        measured_share=fields["measured_bytes"] / unchunked,
        relative_difference=fields["relative_difference"],
        planning_s=fields["planning_s"],
    )


def _model_of(name: str) -> tuple[nn.Module, Batch]:
    """Return the model, without dropout, and inputs of it; always the same."""
    transformers: Any = importlib.import_module("transformers")
    head, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**sizes)
    for key in ("dropout", "drop_path_rate", "classifier_dropout_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if head.startswith(("Image", "Semantic")):
        return Positional(model, ["pixel_values"]), _batch(torch.randn(_BATCH, 3, _PIXELS, _PIXELS))
    tokens = torch.randint(1, _VOCABULARY, (_BATCH, _TOKENS))
    if head == "Seq2SeqLM":
        return Positional(model, ["input_ids", "decoder_input_ids"]), _batch(tokens, tokens.flip(1))
    return Positional(model, ["input_ids"]), _batch(tokens)


def _batch(*inputs: Tensor) -> Batch:
    return Batch(inputs=inputs, targets=())


def _loss(outputs: Any) -> Tensor:
    parts = [leaf.square().mean() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack(parts).sum()


def _table(rows: list[Planned]) -> Table:
    return table_of(
        rows,
        {
            "architecture": "architecture",
            "outcome": "outcome",
            "bytes as it is": "unchunked_bytes:,",
            "predicted": "predicted_share:.1%",
            "measured": "measured_share:.1%",
            "kept": lambda row: "yes" if row.is_kept else "no",
            "difference": "relative_difference:.1e",
            "equal": lambda row: "yes" if row.is_equal else "no",
            "planned in, s": "planning_s:.1f",
            "sentence": lambda row: row.sentence[:120],
        },
    )


if __name__ == "__main__":
    sys.exit(main())

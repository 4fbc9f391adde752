"""What `assert_neutral` says of ten architectures of `transformers` with their own checkpoints.

python -m bench.gallery --part assert_neutral --matching Llama
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.table import table_of
from harness.check import NotNeutral, assert_neutral

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GPT2Config": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "LlamaConfig": ("CausalLM", _SMALL),
    "Qwen2Config": ("CausalLM", _SMALL),
    "MistralConfig": ("CausalLM", _SMALL),
    "Gemma2Config": ("CausalLM", _SMALL),
    "MixtralConfig": ("CausalLM", _SMALL | {"num_local_experts": 4}),
    "BertConfig": ("MaskedLM", _SMALL),
    "T5Config": ("Seq2SeqLM", {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2,
                               "vocab_size": 64, "decoder_start_token_id": 0}),
    "ViTConfig": ("ImageClassification", _SMALL | {"image_size": 16, "patch_size": 4}),
    "WhisperConfig": ("SpeechSeq2Seq", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                                        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                                        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64,
                                        "num_mel_bins": 8, "max_source_positions": 16, "pad_token_id": 0,
                                        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
                                        "suppress_tokens": None, "begin_suppress_tokens": None}),
}  # fmt: skip
"""Configuration classes of `transformers`: the head, and sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What one check said.

    Fields:
        subject: architecture.
        verdict: the verdict, or the class of the error.
        first: probe, part and name of the first difference.
        reason, cause: in words.
    """

    subject: str
    variant: str
    verdict: str
    first: str
    reason: str
    cause: str
    seconds: float


def main(words: Sequence[str]) -> int:
    """Check the chosen architectures, print the table, write the JSON."""
    made = parser(__doc__, "assert_neutral", "gallery")
    made.add_argument("--matching", default="", help="only architectures with this in the name")
    arguments = made.parse_args(words)
    warnings.simplefilter("ignore")
    found = [said() for name, said in _architectures() if arguments.matching in name]
    publish(_table(found), arguments.out, protocol={}, results=[asdict(each) for each in found])
    return 0


def _architectures() -> Iterator[tuple[str, Callable[[], Said]]]:
    """Yield the checks of architectures of `transformers`, under both implementations of checkpoints."""
    for name in ARCHITECTURES:
        for use_reentrant in (False, True):
            yield name, partial(_architecture, name, use_reentrant=use_reentrant)


def _architecture(name: str, *, use_reentrant: bool) -> Said:
    transformers: Any = importlib.import_module("transformers")
    head, sizes = ARCHITECTURES[name]

    def make() -> Any:
        config = getattr(transformers, name)(**sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return getattr(transformers, f"AutoModelFor{head}").from_config(config).train()

    def variant(model: Any) -> None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})

    batch = _inputs(head)
    words = "reentrant" if use_reentrant else "non-reentrant"
    return _said(name, words, lambda: assert_neutral(make, batch, variant))


def _inputs(head: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (2, 8), generator=random)
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random), "labels": torch.tensor([0, 1])}
    if head == "SpeechSeq2Seq":
        return {"input_features": torch.randn(2, 8, 32, generator=random), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def _said(subject: str, variant: str, check: Callable[[], object]) -> Said:
    """Return what a check says."""
    started, first, cause = time.perf_counter(), "", ""
    try:
        check()
        verdict, reason = "neutral", ""
    except NotNeutral as found:
        verdict, reason, cause = found.verdict, found.found.reason or "", found.found.cause
        first = " ".join(str(found.first.get(key, "")) for key in ("probe", "part", "name"))
    except ValueError as error:
        verdict, reason = "refused", str(error)
    return Said(
        subject=subject,
        variant=variant,
        verdict=verdict,
        first=first.strip(),
        reason=reason,
        cause=cause,
        seconds=time.perf_counter() - started,
    )


def _table(said: list[Said]) -> Table:
    return table_of(
        said,
        {
            "architecture": "subject",
            "checkpoints": "variant",
            "verdict": "verdict",
            "first difference": "first",
            "s": "seconds:.1f",
            "reason": lambda each: each.reason[:120],
        },
    )

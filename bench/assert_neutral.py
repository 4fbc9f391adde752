"""What `assert_neutral` says of modules as users write them, and of `transformers` with its own checkpoints.

python -m bench.assert_neutral
python -m bench.assert_neutral --sets transformers --matching Llama
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import nn

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.check import NotNeutral, assert_neutral
from harness.experiment.experiment import Experiment
from harness.models.base import Batch
from harness.trial.batches import batches
from harness.trial.plain_model import PlainModel
from tests.matrix.audit import Case, cases

SETS = ("authors", "newcomer", "unseen", "transformers")
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ALSO: Mapping[str, tuple[str, ...]] = {
    "refused": ("refused", "differs"),
    "unverified": ("unverified", "refused"),
}
"""What a check says instead of a trial: a variant that raises differs, and weights of no seed are refused."""

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
        subject: factory or architecture.
        expected: the verdict that it should give; empty where nobody knows.
        verdict: the verdict, or the class of the error.
        first: probe, part and name of the first difference.
        reason, cause: in words.
    """

    subject: str
    variant: str
    expected: str
    verdict: str
    first: str
    reason: str
    cause: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the verdict is the expected one."""
        return not self.expected or self.verdict in _ALSO.get(self.expected, (self.expected,))


class WithLoss(nn.Module):
    """A model with its loss, as `transformers` has it."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss

    def forward(self, *inputs: Any, **keywords: Any) -> dict[str, Any]:
        """Return the loss, and what the model returns."""
        outputs = self.model(*inputs, **keywords)
        return {"loss": self.loss_of(outputs), "outputs": outputs}


def main() -> int:
    """Run the chosen sets, print the tables, write the JSON; return 1 where a verdict is wrong."""
    made = parser(__doc__, "assert_neutral")
    made.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    made.add_argument("--matching", default="", help="only factories or architectures with this in the name")
    arguments = made.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[Said]] = {}
    for each in arguments.sets:
        runs = _architectures() if each == "transformers" else _modules(each)
        found[each] = [said() for name, said in runs if arguments.matching in name]
    tables = [_table(name, said) for name, said in found.items()]
    results = {name: [asdict(each) for each in said] for name, said in found.items()}
    publish(Group(*tables), arguments.out, protocol={"sets": arguments.sets}, results=results)
    return int(not all(each.is_right for said in found.values() for each in said))


def _modules(folder: str) -> Iterator[tuple[str, Callable[[], Said]]]:
    """Yield the checks of a set of `tests.gallery.users`, those that one process without a mesh can do."""
    for case in cases(folder):
        if not any(each.startswith(("mesh", "wrap_order", "chunk", "shard")) for each in case.overrides):
            yield case.factory, partial(_module, case)


def _module(case: Case) -> Said:
    name, variant = case.factory, " ".join(case.overrides)
    points = (
        "model=python",
        f"model.factory=tests.gallery.users.{name}",
        f"model.layers_fqn={case.layers_fqn}",
    )
    try:
        (experiment,) = experiments([[*points, "mesh.device=cpu", *case.overrides]])
        batch = batches(experiment, torch.device("cpu"), 0)(0)
    except ValueError as refusal:
        return _said(name, variant, case.expected, partial(_raise, refusal))

    def applied(model: WithLoss) -> WithLoss:
        model.model = experiment.ac.apply(model.model, batch.inputs)
        return model

    def check() -> None:
        make = partial(_made, experiment, batch)
        # a loss may hold its targets: one example, or none
        inputs: Any = batch.inputs if not batch.keywords else dict(batch.keywords)
        assert_neutral(make, inputs, applied, steps=experiment.protocol.parity_steps)

    return _said(name, variant, case.expected, check)


def _made(experiment: Experiment, batch: Batch) -> WithLoss:
    plain = PlainModel.of(experiment, torch.device("cpu"))
    return WithLoss(plain.model, lambda outputs: plain.loss(outputs, batch))


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
    return _said(name, words, "", lambda: assert_neutral(make, batch, variant))


def _inputs(head: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (2, 8), generator=random)
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random), "labels": torch.tensor([0, 1])}
    if head == "SpeechSeq2Seq":
        return {"input_features": torch.randn(2, 8, 32, generator=random), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def _raise(error: Exception) -> None:
    raise error


def _said(subject: str, variant: str, expected: str, check: Callable[[], object]) -> Said:
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
        expected=expected,
        verdict=verdict,
        first=first.strip(),
        reason=reason,
        cause=cause,
        seconds=time.perf_counter() - started,
    )


def _table(name: str, said: list[Said]) -> Table:
    """Return all rows of a set without expectations, and of others those that are not right."""
    right = sum(each.is_right for each in said)
    alarms = sum(each.verdict == "differs" and each.expected == "neutral" for each in said)
    shown = [each for each in said if not each.expected or not each.is_right]
    return table_of(
        shown,
        {
            "subject": "subject",
            "variant": "variant",
            "expected": "expected",
            "verdict": "verdict",
            "first difference": "first",
            "s": "seconds:.1f",
            "reason": lambda each: each.reason[:120],
        },
        title=f"{name}: {right} of {len(said)} right, {alarms} false alarms",
    )


if __name__ == "__main__":
    sys.exit(main())

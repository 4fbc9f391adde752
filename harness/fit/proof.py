"""The proof of an option: one step of training next to the plain model, at a size that this machine has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.check import NotNeutral, assert_neutral
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, name_of
from harness.fit.options import Option, Proof, words_of_classes
from harness.fit.subject import Subject
from harness.models.base import ModelSpec
from harness.predict.prediction import step_of
from harness.records import files
from harness.trial.batches import batches
from strategies import StrategyError, ac_variants, generators
from strategies.ac.budget import Budget
from strategies.budget.planning.planner import BudgetBelowMinimum
from strategies.regions.blocks import find_blocks
from strategies.written.loaded_file import apply_of

_SMALL_BYTES = 64 << 20
"""Peak of a step that is trained as it is."""

_FRACTION, _ROOM = 0.6, 1.001
"""Budget of a plan for the small model, of its own peak, and what is added to the smallest that one keeps."""

_SAMPLES, _TOKENS = 2, 32
_DEEP = frozenset({"depth", "layers", "n_layer", "n_layers", "num_layers", "num_hidden_layers", "n_blocks"})
_WIDE = frozenset(
    {
        "dim", "d_model", "embed_dim", "ffn_dim", "hidden", "hidden_dim", "hidden_size", "hidden_width",
        "intermediate_size", "msa_width", "n_embd", "pair_width", "vocab_size", "width",
    }
)  # fmt: skip
"""Names of fields and arguments that say how deep and how wide a model is."""

_SMALLER = ((1, 1), (2, 1), (2, 4), (2, 16), (2, 64))
"""What is tried in turn: at most so many layers (1: all), and a share of the widths."""


REWOUND = "ac=full ac.rewind=true"
_OF_STATE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ac=nested", "nested", {}),
    (REWOUND, "full", {"rewind": True}),
)
"""What keeps state that forward changes as one run leaves it."""

_OF_VOCABULARY = (
    "tokens are drawn below model.vocab_size, {size}: give vocab_size=N, the rows of the embedding, where "
    "the factory takes it, else acbench model.vocab_size=N"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """The result of a proof.

    Fields:
        verdict: `neutral`, `differs` or `unverified`.
        proof: how it was shown; `None` where nothing was.
        note: why there is none, or what differs; empty where the option is neutral.
        raised: whether the plain model does not train on the tokens that were drawn.
    """

    verdict: str
    proof: Proof | None = None
    note: str = ""
    raised: bool = False


class Small(NamedTuple):
    """A step that this machine trains in place of the subject's. `words`: how it differs, in words."""

    experiment: Experiment
    words: str


def prove(small: Small | None, option: Option) -> Proven:
    """Return whether one step under an option is, bit for bit, that of the plain model; on the CPU.

    Args:
        small: what is trained; `None` where the model has no small size.
    """
    if option.experiment.mesh.world_size > 1:
        return Proven(verdict="unverified", note="nothing was proven: the step is one of several ranks")
    if name_of(option.experiment.chunk) != "none":
        return Proven(verdict="unverified", note="nothing was proven of chunks; acbench proves them")
    if small is None:
        is_ours = option.needs_acbench
        how = "acbench " + " ".join(option.overrides) if is_ours else f"apply_{option.variant}.py --check"
        return Proven(
            verdict="unverified",
            note=f"nothing was proven, the model has no small size here; {how} proves it where it trains",
        )
    experiment, words = small
    problem = "the small model has other blocks"
    variant = _variant(option, experiment)
    while variant is not None:
        try:
            return _proven(experiment, variant, words)
        except (ConfigError, StrategyError) as error:
            problem, variant = str(error), _at_the_smallest(variant, error)
    size = getattr(experiment.model, "vocab_size", None)
    is_index = "index" in problem.lower() and "raises" in problem and size is not None
    is_index = is_index and experiment.model.reads_tokens()
    advice = f"; {_OF_VOCABULARY.format(size=size)}" if is_index else ""
    return Proven(verdict="unverified", note=f"nothing was proven: {problem}{advice}", raised=is_index)


def remedies_of_state(subject: Subject, small: Small) -> dict[str, Proven]:
    """Return the strategies, in words of `acbench`, that are neutral where forward changes state.

    Args:
        subject: the step that is asked about.
    """
    found = {}
    named = {name: each for name, each in subject.named_blocks.items() if each}
    for words, name, options in _OF_STATE:
        # one of them may not know blocks by their class, or not suit the model
        with suppress(ConfigError, StrategyError, TypeError):
            proven = _proven(small.experiment, ac_variants[name](**named, **options), small.words)
            if proven.verdict == "neutral":
                found[" ".join((words, *words_of_classes(subject.experiment)))] = proven
    return found


def _proven(experiment: Experiment, variant: Any, words: str) -> Proven:
    model = experiment.model
    batch = batches(experiment, torch.device("cpu"), dp_rank=0)(0)
    given: Any = dict(batch.keywords) if batch.keywords and not batch.inputs else batch.inputs
    if batch.keywords and batch.inputs:
        return Proven(verdict="unverified", note="nothing was proven: inputs come by position and by name")

    def make() -> nn.Module:
        with torch.device("cpu"):
            return model.make()[0]

    rows = batch.row_count() if not experiment.model.reads_tokens() else experiment.batch_size
    try:
        found = assert_neutral(
            make,
            given,
            variant,
            loss_fn=lambda outputs: model.loss(outputs, batch),
            autocast=torch.bfloat16 if experiment.dtype == "bf16_mixed" else None,
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}.get(experiment.dtype),
            quick=True,
        )
    except NotNeutral as error:
        said = str(error).splitlines()[0].removeprefix(f"{error.verdict}: ")
        is_different = error.verdict == "differs"
        note = said if is_different else f"nothing was proven: {said}"
        return Proven(verdict="differs" if is_different else "unverified", note=note)
    level = found.parity.level if found.parity is not None else "bitwise"
    return Proven(verdict="neutral", proof=Proof(batch_size=rows, steps=1, level=level, words=words))


def _at_the_smallest(variant: Any, error: Exception) -> Budget | None:
    """Return `variant` with the smallest budget that a plan keeps; `None` unless its own was too small."""
    found = error.__cause__
    if (
        not isinstance(variant, Budget)
        or variant.fraction != _FRACTION
        or not isinstance(found, BudgetBelowMinimum)
    ):
        return None
    plain_peak_bytes = found.budget_bytes / _FRACTION
    return replace(variant, fraction=min(1.0, _ROOM * found.minimum_feasible_bytes / plain_peak_bytes))


def _variant(option: Option, experiment: Experiment) -> Any:
    """Return what puts the option on the small model: its own file, for the blocks that are there."""
    with generators.restored(), torch.device("meta"):
        model = experiment.model.build()
    names = list(find_blocks(model, **_named(experiment)))
    if option.write is None:
        ac = option.experiment.ac
        is_same = replace(experiment, ac=ac) == option.experiment
        if name_of(ac) != "budget" or is_same:
            return ac
        return Budget(**_named(experiment), fraction=_FRACTION)
    text = option.write(names)
    if text is None:
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"apply_{option.variant}.py"
        files.write_atomically(file, text)
        return apply_of(str(file), f"apply_{option.variant}.py")


def _named(experiment: Experiment) -> dict[str, Any]:
    return {name: getattr(experiment.ac, name) for name in ("layers_fqn", "module_classes")}


def small_step(subject: Subject) -> Small | None:
    """Return the same step with a model that fits here; `None` where there is none."""
    experiment = subject.experiment
    if step_of(subject.plain).memory.peak_bytes <= _SMALL_BYTES:
        return Small(experiment, "the step as it is")
    if subject.has_batch:
        experiment = replace(experiment, batch_size=min(experiment.batch_size, _SAMPLES))
    if experiment.model.reads_tokens():
        experiment = replace(experiment, sequence_length=min(experiment.sequence_length, _TOKENS))
    for layers, share in _SMALLER:
        with suppress(ConfigError, StrategyError, ValueError, RuntimeError):
            spec = experiment.model if (layers, share) == (1, 1) else _shrunk(experiment.model, layers, share)
            with generators.restored(), torch.device("meta"):
                model = spec.build()
            count = sum(parameter.numel() for parameter in model.parameters())
            if count <= subject.most_parameters:
                blocks = len(find_blocks(model, **subject.named_blocks))
                words = f"{count / 1e6:.1f}M parameters, {blocks} blocks"
                return Small(replace(experiment, model=spec), words)
    return None


def _shrunk(spec: ModelSpec, layers: int, share: int) -> ModelSpec:
    """Return a model of fewer layers and smaller widths, by its fields and its factory's arguments."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    changed: dict[str, Any] = _smaller(values, layers, share)
    for name in ("kwargs", "overrides"):
        if isinstance(values.get(name), Mapping):
            changed[name] = {**values[name], **_smaller(values[name], layers, share)}
    if "config_class" in values:  # one of transformers: sizes that are not set are the class's own
        usual = {"n_layers": layers, "width": 4096 // share, "n_heads": 4}
        changed |= {name: size for name, size in usual.items() if values[name] is None}
    return replace(spec, **changed)


def _smaller(values: Mapping[str, Any], layers: int, share: int) -> dict[str, int]:
    sizes = {
        name: each for name, each in values.items() if isinstance(each, int) and not isinstance(each, bool)
    }
    deep = {name: min(size, layers) for name, size in sizes.items() if name in _DEEP}
    return deep | {name: max(1, size // share) for name, size in sizes.items() if name in _WIDE}

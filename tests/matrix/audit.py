"""Modules as users write them and architectures of `transformers`, through the command: what it says of each.

A set of modules is a folder of `tests.gallery.users` with a list of cases. A case is right when the verdict
is the expected one and the sentence blames the expected part and block first. A false alarm is a module that
is right and gets `differs`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.records.parity_result import PARTS
from harness.records.record import validate
from harness.records.store import RECORD

MODULES = Path(__file__).parents[1] / "gallery" / "users"
SETS = ("authors", "newcomer", "unseen")
_NARROW = "intermediate_size: 64"
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "LlamaConfig": ("model.layers", _NARROW),
    "MistralConfig": ("model.layers", _NARROW),
    "Qwen3Config": ("model.layers", f"{_NARROW}, head_dim: 8"),
    "Gemma2Config": ("model.layers", f"{_NARROW}, head_dim: 8"),
    "MixtralConfig": ("model.layers", f"{_NARROW}, num_local_experts: 4"),
    "GPT2Config": ("transformer.h", ""),
    "OPTConfig": ("model.decoder.layers", "ffn_dim: 64, word_embed_proj_dim: 32"),
    "BertConfig": ("bert.encoder.layer", _NARROW),
    "T5Config": ("encoder.block", "d_ff: 64, d_kv: 8"),
    "ViTConfig": ("vit.layers", f"{_NARROW}, image_size: 32, patch_size: 8"),
}
"""Ten configuration classes of `transformers`: container of the blocks, sizes beside width and heads."""

_VARIANTS = "ac=none,full,selective_layer,selective_op,nested,offload"
MESHES = ("single", "shard2")
_SIZES = (
    "batch_size=2",
    "model.width=32",
    "model.n_heads=4",
    "protocol.parity_steps=2",
)
_DIFFERS_ALL_THE_SAME = {"ac.preserve_rng_state=false", "ac=nested", "ac=offload"}
_PROTOCOL = ("tracker=none", "protocol=parity", "mesh.device=cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A module under a variant, and what is right.

    Fields:
        factory: set, file and function: `newcomer.counters:router`.
        layers_fqn: container of its blocks.
        overrides: variant and its options.
        expected: a verdict, or `refused` where no trial ends well: by us, or by the module's own error.
        part: what the sentence must blame first, a part of a training step; `None` where any is right.
        name: begin of the name that it must blame; `None` where any is right.
    """

    factory: str
    layers_fqn: str
    overrides: tuple[str, ...]
    expected: str
    part: str | None
    name: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the command said of a case.

    Fields:
        verdict: of the record, or its status where the trial did not end well.
        sentence: the first difference, or the error.
    """

    factory: str
    variant: str
    expected: str
    verdict: str
    sentence: str
    is_right: bool


def cases(folder: str) -> list[Case]:
    """Return the cases of the set in `folder` of `tests.gallery.users`."""
    listed: Any = OmegaConf.to_container(OmegaConf.load(MODULES / folder / "cases.yaml"))
    return [
        Case(
            factory=f"{folder}.{each['factory']}",
            layers_fqn=each.get("layers_fqn", "blocks"),
            overrides=tuple(each["overrides"]),
            expected=each["expected"],
            part=each.get("part"),
            name=each.get("name"),
        )
        for each in listed
    ]


def rewound(chosen: Sequence[Case]) -> list[Case]:
    """Return the cases that differ, with their state put back: they should be neutral."""
    return [
        dataclasses.replace(
            case, overrides=(*case.overrides, "ac.rewind=true"), expected="neutral", part=None, name=None
        )
        for case in chosen
        if case.expected == "differs" and not set(case.overrides) & _DIFFERS_ALL_THE_SAME
    ]


def answers(chosen: Sequence[Case]) -> Iterator[Answer]:
    """Yield the answer to each case; those of the same options are one sweep."""
    sweeps: dict[tuple[str, tuple[str, ...]], list[Case]] = defaultdict(list)
    for case in chosen:
        sweeps[case.layers_fqn, case.overrides].append(case)
    for (layers_fqn, overrides), alike in sweeps.items():
        factories = ",".join(f"tests.gallery.users.{case.factory}" for case in alike)
        records = _records(
            "model=python", f"model.factory={factories}", f"model.layers_fqn={layers_fqn}", *overrides
        )
        by_factory = {each["experiment"]["model"]["factory"]: each for each in records}
        for case in alike:
            yield _answer(case, by_factory.get(f"tests.gallery.users.{case.factory}"))


def _answer(case: Case, record: Mapping[str, Any] | None) -> Answer:
    verdict, sentence = _said(record)
    words = {case.part, PARTS.get(case.part or "")} - {None}
    blames = (not words or any(str(word) in sentence for word in words)) and (case.name or "") in sentence
    is_verdict = verdict == case.expected
    return Answer(
        factory=case.factory,
        variant=" ".join(case.overrides),
        expected=" ".join(filter(None, (case.expected, case.part, case.name))),
        verdict=verdict,
        sentence=sentence,
        is_right=is_verdict and blames and (verdict == "neutral" or bool(sentence)),
    )


def _said(record: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the verdict, or the status of a trial that did not end well, and its sentence."""
    if record is None:
        return "nothing", ""
    if record["status"] != "ok":
        is_refused = record["status"] in {"refused", "failed"}
        return "refused" if is_refused else record["status"], record["error"]["message"]
    found = validate(record)
    return found.verdict, found.reason or ""


def architecture(config_class: str, mesh: str) -> Iterator[Answer]:
    """Yield what the command says of an architecture under each variant: neutral, or refused."""
    layers_fqn, sizes = ARCHITECTURES[config_class]
    points = (
        "model=hf",
        f"model.config_class={config_class}",
        f"model.layers_fqn={layers_fqn}",
        f"model.overrides={{{sizes}}}",
        *(() if "image_size" in sizes else ("sequence_length=16",)),
    )
    for record in _records(*points, *_SIZES, _VARIANTS, f"mesh={mesh}"):
        verdict, sentence = _said(record)
        yield Answer(
            factory=config_class,
            variant=f"ac={record['experiment']['ac']['name']} mesh={mesh}",
            expected="neutral",
            verdict=verdict,
            sentence=sentence,
            is_right=verdict == "neutral",
        )


def _records(*overrides: str) -> list[dict[str, Any]]:
    """Run the sweep of `overrides` as a user would and return its records."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "-m", *_PROTOCOL, "name=audit", f"outputs_dir={folder}"]
        ended = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
        records = [
            json.loads(path.read_text("utf-8")) for path in sorted(Path(folder, "audit").glob(f"*/{RECORD}"))
        ]
        if not records:
            sys.stderr.write(ended.stderr)
        return records

"""The words of `acbench-fit`, and the step and device that they describe; none of them is Hydra's."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from harness.command_line.schema import experiment_fields, hardware_of, materialise
from harness.command_line.unknown_option import suggestion
from harness.errors import ConfigError
from harness.experiment.data import Synthetic
from harness.fit.subject import MARGIN, Subject
from harness.models import families
from harness.predict.hardware import Hardware
from harness.trial.preflight import Preflight, Refusal, built_refusal
from strategies import StrategyError

_PACKAGE = Path(__file__).parents[1]
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
_GIB = 1 << 30
_OF_CUDA_BYTES = 1 << 30
"""What CUDA's context and NCCL's buffers keep."""

_SAID_AS = (
    (re.compile(r"\bmodel\.(kwargs|overrides)\.(?=\w)"), ""),
    (re.compile(r"\bmodel\.factory\b"), "FACTORY"),
    (re.compile(r"\bmodel\.config_class\b"), "FACTORY"),
    (re.compile(r"\bmodel\.layers_fqn\b"), "--blocks"),
    (re.compile(r"\bmodel\.(?=\w)"), ""),
    (re.compile(r"ac\.module_classes=\[(\w+)\]"), r"--blocks \1"),
    (re.compile(r" \(in a program module_classes=\S+\)"), ""),
    (re.compile(r"\bac\.module_classes\b"), "--blocks"),
    (re.compile(r"\bbatch_size\b"), "--batch"),
    (re.compile(r"\bsequence_length\b"), "--seq"),
    (re.compile(r"\bmesh\.(?=\w)"), "--mesh "),
    (re.compile(r"^dtype\b"), "--dtype"),
    (re.compile(r"^hardware\.flops_per_s\.\w+"), "--dtype"),
    (re.compile(r"^hardware\b"), "--on"),
)
"""How messages about a configuration name what was typed here."""

_IN_PROGRAM = (
    (re.compile(r"\bmodel\.factory\b"), "make"),
    (re.compile(r"ac\.module_classes=\[(\w+)\]"), r'module_classes=["\1"]'),
    (re.compile(r" \(in a program module_classes=\S+\)"), ""),
)
"""How they name arguments of `acbench.fit`."""

_DESCRIPTION = """\
Say what to switch on so that training a model fits a device: every option is predicted without building the
model with memory, the fastest that fits is proven by one small step, and each is a file with `apply(model)`.
"""
_EPILOG = """\
examples:
  acbench-fit my_models:make --on rtx4090 --batch 64 --seq 1024 --dtype bf16_mixed width=512 depth=12
  acbench-fit hf:LlamaConfig --gib 40 hidden_size=2048 num_hidden_layers=16
  acbench-fit llama_7b --on h100 --mesh dp_shard=8 --json

exit status: 0 something fits, 1 nothing does and the answer says what would, 2 the command was refused
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options of a command.

    Fields:
        subject: the step and the device.
        is_json: whether the answer is printed as JSON.
        is_proven: whether a small step of the answer runs.
    """

    subject: Subject
    out: Path
    is_json: bool
    is_proven: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse a command in one line."""
        raise ConfigError("command", f"{message}; acbench-fit --help shows what there is")


def parser() -> argparse.ArgumentParser:
    """Return what reads the words of a command."""
    shown = _Parser(
        prog="acbench-fit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shown.add_argument(
        "factory", metavar="FACTORY", help="module:function, hf:ConfigClass, or a model that ships (llama_7b)"
    )
    shown.add_argument(
        "--on", metavar="HARDWARE", help=f"{', '.join(_names_in('hardware'))}; default: this device"
    )
    shown.add_argument(
        "--gib", type=float, metavar="N", help="GiB that a step may take, instead of the device's"
    )
    shown.add_argument("--batch", type=int, metavar="N", help="samples of a step over all ranks")
    shown.add_argument("--seq", type=int, metavar="N", help="tokens of a sample, for models that read tokens")
    shown.add_argument("--dtype", help="fp32, bf16, bf16_mixed; default: as the model is made, or fp32")
    shown.add_argument("--mesh", metavar="SIZES", help="dp_shard=8,tp=2, or a mesh that ships (shard2)")
    shown.add_argument(
        "--blocks",
        metavar="NAME",
        help="container of the blocks, or their class or classes (Encoder,Decoder); default: they are found",
    )
    shown.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    shown.add_argument(
        "--out", default="fit", metavar="DIR", help="folder of apply_<variant>.py (default: fit)"
    )
    shown.add_argument("--no-proof", action="store_true", help="run no small step of the answer")
    shown.add_argument("--version", action="version", version=f"acbench-fit {version('acbench')}")
    shown.add_argument(
        "values", nargs="*", metavar="key=value", help="arguments of the factory, or model fields"
    )
    return shown


def asked(words: Sequence[str]) -> Asked:
    """Return what a command asks for.

    Raises:
        ConfigError, StrategyError: it is refused; the message names what was typed, and the remedy.
    """
    with in_words_of_fit():
        typed = parser().parse_intermixed_args(list(words))
        values = dict(map(_pair, typed.values))
        config = _composed(typed, values)
        fields = experiment_fields(config)
        experiment = materialise(fields)
        if experiment.model.reads_tokens():  # of any length, which a text has not
            experiment = replace(experiment, data=Synthetic())
        Preflight(built=_refusal).check(experiment)
        hardware, spec = hardware_named(typed.on, typed.gib), experiment.model
        is_factory = ":" in typed.factory and not typed.factory.startswith("hf:")
        fixed = spec.fixed_batch(device="meta")
        notes = () if fixed is None else ("the factory gives one example, so no other batch was tried",)
        subject = Subject(
            label=typed.factory,
            experiment=experiment,
            hardware=hardware,
            is_found=typed.blocks is None and fields["model"].get("layers_fqn", "") is None,
            factory=typed.factory if is_factory else None,
            has_batch=fixed is None,
            margin=MARGIN,
            notes=notes,
        )
        return Asked(subject=subject, out=Path(typed.out), is_json=typed.json, is_proven=not typed.no_proof)


def _refusal(check: str, *others: Any) -> Refusal:
    """Return why a check refuses a model; whether variants suit it is seen by tracing them."""
    return None if check == "check_variant" else built_refusal(check, *others)


@contextmanager
def in_words_of_fit() -> Iterator[None]:
    """Let refusals name what was typed, and not the options of a trial."""
    try:
        yield
    except (ConfigError, StrategyError) as error:
        raise ConfigError(_said(error.where), _said(error.problem)) from error


@contextmanager
def in_words_of_program() -> Iterator[None]:
    """Let refusals name the arguments of a function."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(_said(each, _IN_PROGRAM) for each in (error.where, error.problem))) from error


def _said(text: str, said_as: Sequence[tuple[re.Pattern[str], str]] = _SAID_AS) -> str:
    for pattern, words in said_as:
        text = pattern.sub(words, text)
    return text


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError("command", f"{word!r} is no key=value; options of the model are written width=512")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(name, f"{value!r} cannot be read: {str(error).splitlines()[0]}") from error


def _names_in(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _composed(typed: argparse.Namespace, values: Mapping[str, Any]) -> DictConfig:
    """Return the configuration of the step, as Hydra composes it."""
    head, _, rest = typed.factory.partition(":")
    group = "hf" if head == "hf" and rest else "python" if rest else head
    models = _names_in("model")
    if group not in models or (group in ("hf", "python") and not rest):
        problem = f"{typed.factory!r} is no module:function, hf:ConfigClass or model that ships"
        raise ConfigError("FACTORY", f"{problem}; {suggestion(head, models)}")
    mesh, sizes = _mesh(typed.mesh)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=[f"model={group}", f"mesh={mesh}", "ac=full"])
    OmegaConf.set_struct(config, value=False)
    changes: dict[str, Any] = {f"mesh.{name}": size for name, size in sizes.items()}
    if group == "python":
        changes |= {"model.factory": typed.factory, "model.kwargs": dict(values)}
        changes |= _lifted(changes["model.kwargs"], "dropout")
        if isinstance(values.get("vocab_size"), int):  # tokens are drawn below it
            changes["model.vocab_size"] = values["vocab_size"]
        changes["model.kwargs"] = changes["model.kwargs"] or None
    elif group == "hf":
        changes |= {"model.config_class": rest, "model.overrides": dict(values), "model.n_layers": None}
        changes |= {"model.width": None, "model.n_heads": None}
        changes |= _lifted(changes["model.overrides"], "dropout", "head", "vocab_size")
        changes["model.overrides"] = changes["model.overrides"] or None
    else:
        changes |= _fields(config, values)
    changes |= {
        name: value
        for name, value in (
            ("batch_size", typed.batch),
            ("sequence_length", typed.seq),
            ("dtype", typed.dtype),
        )
        if value is not None
    }
    if typed.blocks is not None:
        names = typed.blocks.split(",")
        is_class = len(names) > 1 or (typed.blocks[:1].isupper() and "." not in typed.blocks)
        changes |= {"ac.module_classes": names} if is_class else {"model.layers_fqn": typed.blocks}
    for name, value in changes.items():
        OmegaConf.update(config, name, value, force_add=True)
    return config


def _lifted(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {f"model.{name}": values.pop(name) for name in names if name in values}


def _fields(config: DictConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name for each in dataclasses.fields(families()[config.model.family])}
    for name in values:
        if name not in known:
            problem = f"{config.model.name} has no such field"
            raise ConfigError(name, f"{problem}; {suggestion(name, sorted(known))}")
    return {f"model.{name}": value for name, value in values.items()}


def _mesh(words: str | None) -> tuple[str, dict[str, int]]:
    """Return the mesh that ships, and the sizes that differ.

    Raises:
        ConfigError: there is no such mesh, or a size is no number.
    """
    if words is None:
        return "single", {}
    if any(part.startswith("pp") for part in re.split("[,_]", words)):
        problem = "pp cuts a step into micro-batches, and an answer is for one batch"
        raise ConfigError("--mesh", f"{problem}; ask acbench-plan mesh=pp2 microbatches=4, or leave pp out")
    if "=" not in words:
        names = _names_in("mesh")
        if words not in names:
            problem = f"unknown {words!r}"
            raise ConfigError("--mesh", f"{problem}; {suggestion(words, names)}; or write dp_shard=8,tp=2")
        return words, {}
    sizes: dict[str, int] = {}
    for part in words.split(","):
        name, _, value = part.partition("=")
        if not value.isdecimal():
            raise ConfigError("--mesh", f"{part!r} is no size; write dp_shard=8,tp=2")
        sizes[name] = int(value)
    return "single", sizes


def hardware_named(name: str | None, gib: float | None) -> Hardware:
    """Return hardware by its name, or the device at hand, with so many usable GiB.

    Raises:
        ConfigError: there is none of this name, or the device at hand is not known.
    """
    names = _names_in("hardware")
    if name is not None and name not in names:
        problem = f"unknown {name!r}"
        raise ConfigError("--on", f"{problem}; {suggestion(name, names)}; or give the memory with --gib")
    if gib is not None and not gib > 0:
        raise ConfigError("--gib", f"must be above 0, got {gib}")
    found = _of_file(name) if name is not None else _at_hand(names, gib)
    return found if gib is None else replace(found, usable_gib=gib)


def _of_file(name: str) -> Hardware:
    found = hardware_of(OmegaConf.create({"hardware": OmegaConf.load(CONF / "hardware" / f"{name}.yaml")}))
    assert found is not None, "it was named"
    return found


def _at_hand(names: Sequence[str], gib: float | None) -> Hardware:
    """Return the device at hand: a GPU by its name, or this CPU.

    Raises:
        ConfigError: the GPU is of no kind that ships.
    """
    if not torch.cuda.is_available():
        return _of_file("this_cpu")
    device = torch.cuda.get_device_properties(0)
    plain = device.name.lower().replace(" ", "")
    kinds = [each for each in names if each.replace("_", "") in plain and each != "this_cpu"]
    if not kinds:
        problem = f"{device.name} is of no kind that is known"
        raise ConfigError(
            "--on", f"{problem}; name the nearest of {', '.join(names)}, and its memory with --gib"
        )
    usable_gib = gib or (device.total_memory - _OF_CUDA_BYTES) / _GIB
    return replace(_of_file(max(kinds, key=len)), usable_gib=usable_gib)

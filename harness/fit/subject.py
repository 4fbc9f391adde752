"""The subject of an answer: a training step, a device, and the blocks of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.hardware import Hardware
from harness.report.facts.number_words import human_bytes
from strategies import ac_variants, generators
from strategies.regions.block_search import counted, is_under
from strategies.regions.blocks import by_class, classes_outside, find_blocks, plain_class

MARGIN = 0.05
"""Share of the usable bytes that stays free: kernels of a GPU have other temporaries than those traced."""

_ENOUGH = 0.9
"""Share of the saved bytes below which what lies outside of the blocks is named."""
_FEW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A step that is to fit a device.

    Fields:
        label: what the reader calls the model.
        experiment: the plain step; its `ac` is `full`, which names the blocks.
        is_found: whether the blocks were looked for, and not named.
        margin: share of the usable bytes that stays free.
        factory: `package.module:function` that a written file can be checked with; `None` for other models.
        has_batch: whether the batch may have another size.
        notes: sentences on what is not known.
        most_parameters: parameters of a model that is trained as a proof, at most; with gradients, optimizer
            and a twin, 3 million take about 100 MiB.
    """

    label: str
    experiment: Experiment
    hardware: Hardware
    is_found: bool = False
    margin: float = MARGIN
    factory: str | None = None
    has_batch: bool = True
    notes: tuple[str, ...] = field(default=())
    most_parameters: int = 3_000_000

    @property
    def limit_bytes(self) -> int:
        """Bytes that a step may take."""
        return int(self.hardware.usable_bytes * (1 - self.margin))

    @property
    def named_blocks(self) -> dict[str, Any]:
        """The options by which a variant finds the blocks."""
        ac = self.experiment.ac
        return {name: getattr(ac, name) for name in ("layers_fqn", "module_classes")}

    def variant(self, name: str, **options: Any) -> Experiment:
        """Return the step under a variant of AC on the blocks."""
        return self.under(ac_variants[name](**self.named_blocks, **options))

    @property
    def plain(self) -> Experiment:
        """The plain step."""
        return self.experiment.plain()

    def under(self, ac: Any, **others: Any) -> Experiment:
        """Return the step under what is given."""
        return replace(self.experiment, ac=ac, **others)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of a model, and how much of what forward saves is inside of them.

    Fields:
        classes: class name of each block by its FQN, in order.
        fqn: their container; empty where there is none.
        saved_bytes: what the plain model's forward saves.
        covered_bytes: the part that modules inside of the blocks save.
        outside: bytes by FQN that others save, the most first; `""` is the model itself.
    """

    model: str
    classes: Mapping[str, str]
    fqn: str
    found: bool
    saved_bytes: int
    covered_bytes: int
    outside: Mapping[str, int]

    @property
    def share(self) -> float:
        """Share of the saved bytes inside of the blocks."""
        return self.covered_bytes / self.saved_bytes if self.saved_bytes else 1.0

    @property
    def words(self) -> str:
        """Return what they are and how much they cover, in one line."""
        how = "found" if self.found else "named"
        where = f" in {self.fqn!r}" if self.fqn else ""
        said = f"{counted(self.classes)}{where} ({how}) hold {self.share:.0%}"
        total = f"{said} of the {human_bytes(self.saved_bytes)} that forward saves"
        if self.share >= _ENOUGH:
            return f"{self.model}: {total}"
        parts = (
            f"{fqn or 'the model itself'} {count / self.saved_bytes:.0%}"
            for fqn, count in list(self.outside.items())[:_FEW]
        )
        return f"{self.model}: {total}; outside: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the blocks as JSON values."""
        return {
            "fqn": self.fqn,
            "count": len(self.classes),
            "found": self.found,
            "saved_bytes": self.saved_bytes,
            "covered_bytes": self.covered_bytes,
            "classes": dict(Counter(self.classes.values())),
            "outside": dict(list(self.outside.items())[:_FEW]),
        }


def blocks_of(subject: Subject, saved_by_module: Mapping[str, int]) -> Blocks:
    """Return the blocks of a subject.

    Args:
        saved_by_module: bytes that the plain forward saves, by the FQN of the module that made them.

    Raises:
        ConfigError: there are none; the message lists the classes of modules with what they save.
    """
    spec, named = subject.experiment.model, subject.named_blocks
    with generators.restored(), torch.device("meta"):
        model = spec.build()
    class_of = {fqn: plain_class(module).__name__ for fqn, module in model.named_modules()}
    if not (named["layers_fqn"] or named["module_classes"]):
        saved: Counter[str] = Counter()
        for fqn, count in saved_by_module.items():
            saved[class_of.get(fqn, type(model).__name__)] += count
        classes = ", ".join(f"{name} {human_bytes(count)}" for name, count in saved.most_common(5))
        problem = f"no blocks found in {type(model).__name__}: no module of it repeats"
        way_out = by_class(classes_outside(model))
        remedy = "; or ".join(
            filter(
                None,
                [way_out, "put what repeats, or stages of it, into a ModuleList or Sequential of modules"],
            )
        )
        raise ConfigError("model.factory", f"{problem}; its classes save {classes or 'nothing'}; {remedy}")
    found = find_blocks(model, **named)
    covered, outside = 0, Counter[str]()
    for fqn, count in saved_by_module.items():
        if any(is_under(fqn, block) for block in found):
            covered += count
        else:
            outside[fqn] += count
    return Blocks(
        model=plain_class(model).__name__,
        classes={fqn: class_of[fqn] for fqn in found},
        fqn="" if named["module_classes"] else named["layers_fqn"],
        found=subject.is_found,
        saved_bytes=sum(saved_by_module.values()),
        covered_bytes=covered,
        outside=dict(outside.most_common()),
    )

"""The answer: which option to use, what else there is, and what is not known."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, name_of
from harness.fit.options import Option, chosen
from harness.fit.predicting import Predictions
from harness.fit.proof import REWOUND, Proven, prove, remedies_of_state, small_step
from harness.fit.subject import Blocks, Subject, blocks_of
from harness.fit.written import applied, text_of, with_files
from harness.predict.prediction import step_of
from harness.predict.solve import solve
from harness.predict.step_log import FakeStep
from harness.report.facts.commands import command
from harness.report.facts.number_words import human_bytes
from harness.trial.models_error import raised_by_model
from strategies import StrategyError

_GIB = 1 << 30
_NOT_KNOWN_OF_GPU = (
    "bytes are those of CPU kernels, exact here; a GPU's attention and optimizer have other temporaries"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The option to switch on, with its proof.

    Fields:
        subject: the step and the device.
        use: the option to use; `None` where nothing fits.
        options: all that were predicted, `use` among them.
        unknown: sentences on what is not known.
        remedies: where nothing fits, what would; each was tried.
        least_plan_bytes: where nothing fits, what a step needs under the smallest plan of `ac=budget`; `None`
            where no plan was sought.
    """

    subject: Subject
    blocks: Blocks
    use: Option | None
    options: tuple[Option, ...]
    unknown: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    least_plan_bytes: int | None = None

    @property
    def plain(self) -> Option:
        """The plain step."""
        return next(each for each in self.options if each.variant == "none")

    @property
    def command(self) -> str | None:
        """The `acbench` command that measures the plain step and the answer; `None` where none does."""
        words, use = self._plain_command, self.use
        if words is None or use is None or use.variant == "none":
            return words
        is_file = use.file is not None and not use.needs_acbench
        return f"{words} {shlex.join(('ac=file', f'ac.path={use.file}') if is_file else use.overrides)}"

    def code(self) -> str:
        """Return the file of the answer, `apply(model) -> model`.

        Raises:
            ValueError: nothing fits, or nothing has to be switched on.
        """
        named = self.subject.label, self._names, self._plain_command
        text = None if self.use is None else text_of(self.use, *named)
        if text is None:
            raise ValueError(f"there is no file: {'nothing fits' if self.use is None else self.use.title}")
        return text

    def apply(self, model: nn.Module) -> nn.Module:
        """Return `model` with the answer on it.

        Raises:
            ValueError: nothing fits.
            StrategyError: the model is another one.
        """
        if self.use is None:
            raise ValueError("nothing fits; see remedies")
        if self.use.variant == "none":
            return model
        return applied(self.use, self.subject.label, self._names, model)

    def written(self, folder: Path) -> Answer:
        """Write the files of all options to a folder, and return the answer with their paths.

        Raises:
            ConfigError: the folder cannot be written.
        """
        options = with_files(list(self.options), self.subject.label, self._names, folder, self._plain_command)
        used = None if self.use is None else options[self.options.index(self.use)]
        return replace(self, options=tuple(options), use=used)

    @property
    def _plain_command(self) -> str | None:
        if self.subject.factory is None and name_of(self.subject.experiment.model) == "in_process":
            return None
        return command(self.subject.plain.to_dict())

    @property
    def _names(self) -> list[str]:
        return list(self.blocks.classes)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        plain = self.plain
        return {
            "model": self.subject.label,
            "blocks": self.blocks.to_dict(),
            "hardware": self.subject.hardware.name,
            "usable_bytes": self.subject.hardware.usable_bytes,
            "margin": self.subject.margin,
            "plain": {
                "peak_bytes": plain.peak_bytes,
                "saved_bytes": plain.saved_bytes,
                "step_time_s": plain.step_time_s,
                "fits": plain.fits,
            },
            "use": None if self.use is None else self.use.to_dict(),
            "options": [each.to_dict() for each in self.options],
            "command": self.command,
            "unknown": list(self.unknown),
            "remedies": list(self.remedies),
            "least_plan_bytes": self.least_plan_bytes,
        }


def answer(
    subject: Subject, *, is_proven: bool = True, tell: Callable[[str], None] = lambda _words: None
) -> Answer:
    """Return the answer for a subject; nothing of the model is built with memory but for the proof.

    Args:
        subject: the step and the device.
        is_proven: train one small step of each option next to the plain model.
        tell: is told what is done next.

    Raises:
        ConfigError, StrategyError: the model, the device or the step cannot be predicted.
    """
    tell("the plain step")
    plain = _plain_step(subject)
    blocks = blocks_of(subject, plain.memory.saved_by_module)
    with TemporaryDirectory() as folder:
        found = Predictions(subject=subject, blocks=blocks, folder=Path(folder), tell=tell)
        found.predict()
        options = [found.with_largest_batch(each) for each in found.options]
        options[0] = replace(options[0], verdict="neutral")  # it is the plain step
        said: list[str] = []
        if is_proven:
            options, said = _all_proven(found, options, tell)
        unknown = [*said, *subject.notes, *found.notes]
        use = chosen(options)
        least_plan_bytes = found.least_plan_bytes() if use is None else None
    if subject.hardware.device != "cpu":
        unknown.append(_NOT_KNOWN_OF_GPU)
    if plain.assumes:
        unknown.append(f"assuming that {'; '.join(plain.assumes)}")
    remedies = () if use is not None else tuple(_remedies(subject, options, least_plan_bytes))
    return Answer(
        subject=subject,
        blocks=blocks,
        use=use,
        options=tuple(options),
        unknown=tuple(dict.fromkeys(unknown)),
        remedies=remedies,
        least_plan_bytes=least_plan_bytes,
    )


def _all_proven(
    predictions: Predictions, options: list[Option], tell: Callable[[str], None]
) -> tuple[list[Option], list[str]]:
    """Return the options with their proofs, maybe one more, and what is to be said."""
    subject, shown = predictions.subject, dict[str, Proven]()
    small = small_step(subject)
    for each in options[1:]:
        tell(f"proof of {each.title}")
        shown[each.variant] = found = prove(small, each)
        if found.raised:  # the plain step does, and so would all
            plain = replace(options[0], verdict="unverified")
            return [plain, *options[1:]], [found.note]
    options = [
        replace(each, verdict=shown[each.variant].verdict, proof=shown[each.variant].proof)
        if each.variant in shown
        else each
        for each in options
    ]
    differing = [each.variant for each in options if each.verdict == "differs"]
    said = []
    if differing:
        assert small is not None, "it was trained"
        remedies = remedies_of_state(subject, small)
        advice = f"; forward changes state: use {' or '.join(remedies)}" if remedies else ""
        for words, proven in remedies.items():
            rewound = predictions.rewound() if words.startswith(REWOUND) else None
            if rewound is not None:
                rewound = predictions.with_largest_batch(rewound)
                options.append(replace(rewound, verdict=proven.verdict, proof=proven.proof))
        word = "differs" if len(differing) == 1 else "differ"
        said.append(f"{', '.join(differing)} {word}: {shown[differing[0]].note}{advice}")
    use = chosen(options)
    if use is not None and use.variant in shown and shown[use.variant].note:
        said.append(shown[use.variant].note)
    return options, said


def _plain_step(subject: Subject) -> FakeStep:
    """Return the plain step.

    Raises:
        ConfigError: it cannot be predicted, or the code of the model or of its loss raises.
        StrategyError: as of `step_of`.
    """
    try:
        return step_of(subject.plain)
    except (ConfigError, StrategyError):
        raise
    except Exception as error:
        raised = raised_by_model(error)
        if raised is None:
            raise
        said = " ".join(raised.splitlines())
        problem = f"the plain step raised {said}; acbench runs it with data"
        raise ConfigError("model.factory", problem) from error


def _remedies(subject: Subject, options: list[Option], least_plan_bytes: int | None) -> list[str]:
    """Return what would fit: a smaller batch, more ranks, a larger device."""
    found = []
    options = [each for each in options if each.verdict != "differs"]
    largest = max(options, key=lambda each: each.largest_batch or 0)
    if largest.largest_batch:
        found.append(f"--batch {largest.largest_batch}{_under(largest, 'with')}")
    least = min(options, key=lambda each: each.peak_bytes)
    sharded = _ranks(subject, least.experiment)
    if sharded is not None:
        found.append(f"--mesh dp_shard={sharded}{_under(least, 'with')}")
    least_bytes = min(each for each in (least.peak_bytes, least_plan_bytes) if each is not None)
    needed = math.ceil(least_bytes / (1 - subject.margin))
    gib = math.ceil(needed / _GIB * 1e6) / 1e6
    under = " for budget" if least_bytes < least.peak_bytes else _under(least, "for")
    return [*found, f"a device with {human_bytes(needed)} usable{under} (--gib {gib:g})"]


def _under(option: Option, word: str) -> str:
    """Return which option a remedy needs; the plain step needs none."""
    return "" if option.variant == "none" else f" {word} {option.variant}"


def _ranks(subject: Subject, experiment: Experiment) -> int | None:
    """Return the fewest ranks whose shards fit; `None` where none do, or the step cannot be sharded so."""
    mesh = replace(experiment.mesh, dp_shard=1)
    hardware = replace(subject.hardware, usable_gib=subject.limit_bytes / _GIB)
    try:
        solved, _ = solve(
            replace(experiment, mesh=mesh),
            "mesh.dp_shard",
            hardware,
            lambda each: step_of(each).memory,
        )
    except (ConfigError, StrategyError):
        return None
    return solved.value

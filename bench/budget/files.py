"""Written files in settings other than those that they were made in: neutral, as predicted, and saving.

Of each of six models (`bench.file_models`) three files are written, at fp32, without dropout, with the
attention kernel of the machine: the first half of the blocks runs again; rules keep half of what they can;
rules keep all. Each runs as `ac=file` in a trial of each setting, next to the plain model: fp32, bf16
autocast, dropout, attention as products, and FSDP2 on two ranks.

`verdict` is that of the trial, `error` the largest relative difference between what was predicted before and
what is measured, `saved` a share of what the plain model saves. A file that is refused is no failure; one
that differs, is predicted otherwise or saves nothing, is.

    python -m bench.budget --part files --models gpt unet --settings fp32 shard2
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import file_models
from bench.output import parser, publish
from bench.table import table_of
from bench.trials import PRELOAD, experiments, records
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.models.parts.given_inputs import given_inputs, seeded
from harness.predict.prediction import predict
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record
from strategies import StrategyError
from strategies.budget.eager import first_call
from strategies.budget.export import operator_modules
from strategies.regions import blocks
from strategies.written.file_text import recomputing_file, rules_file
from strategies.written.heavy_operators import rules_for
from tests.matrix.predicted import differences

MODELS = ("gpt", "vit", "multimodal", "encoder_decoder", "unet", "llama")
FILES = ("first", "half", "all")
SETTINGS: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16_mixed": ("dtype=bf16_mixed",),
    "dropout": ("model.dropout=0.1",),
    "math": ("model.kwargs={kernel: math}",),
    "shard2": ("mesh=shard2",),
}
_USUAL = ("protocol=parity", "protocol.parity_steps=2", "model=python", "model.layers_fqn=blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A file in a setting."""

    model: str
    setting: str
    file: str
    path: str

    @property
    def overrides(self) -> list[str]:
        """What the command line would be given."""
        factory = f"model.factory=bench.file_models:{self.model}"
        return [*_USUAL, factory, "ac=file", f"ac.path={self.path}", *SETTINGS[self.setting]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of a cell.

    Fields:
        verdict: that of the trial; `refused` and `failed` where it has none.
        said: why, where it is not neutral.
        mispredicted: quantities that are not as predicted; `None` without prediction or measurement.
        saved_bytes, plain_saved_bytes: of the file and of the plain model.
        recomputed_flops: what ran again.
    """

    model: str
    setting: str
    file: str
    verdict: str
    said: str = ""
    mispredicted: tuple[str, ...] | None = None
    saved_bytes: int = 0
    plain_saved_bytes: int = 0
    recomputed_flops: int = 0

    @property
    def holds(self) -> bool:
        """Whether it is neutral, predicted to the byte, and saves; or refused."""
        is_neutral = (
            self.verdict == "neutral"
            and self.mispredicted == ()
            and self.saved_bytes < self.plain_saved_bytes
        )
        return is_neutral or self.verdict == "refused"


def main(words: Sequence[str]) -> int:
    """Write, run, print, and return 1 where a file does not hold."""
    made = parser(__doc__, "files", "budget")
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    made.add_argument("--files", nargs="+", choices=FILES, default=FILES)
    chosen = made.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        found = [
            each for setting in chosen.settings for each in findings(agent, chosen, setting, Path(folder))
        ]
    publish(_table(found), chosen.out, protocol=_protocol(chosen), results=[asdict(each) for each in found])
    holding = sum(each.holds for each in found)
    refused = sum(each.verdict == "refused" for each in found)
    print(f"{holding - refused} of {len(found)} neutral, to the byte and saving; {refused} refused; "
          f"{len(found) - holding} otherwise")  # fmt: skip
    return int(holding < len(found))


def findings(agent: Agent, chosen: argparse.Namespace, setting: str, folder: Path) -> Iterator[Finding]:
    """Yield what becomes of the files of all models in one setting."""
    cells = [
        Cell(model=model, setting=setting, file=file, path=str(written(model, file, folder)))
        for model, file in product(chosen.models, chosen.files)
    ]
    given = experiments(cell.overrides for cell in cells)
    predicted = [_predicted(each) for each in given]
    for cell, one, other in zip(cells, predicted, records(agent, given, folder / setting), strict=True):
        yield finding(cell, one, other)


def written(model: str, file: str, folder: Path) -> Path:
    """Return the path of a file of a model, which is written where it is not there."""
    path = folder / f"apply_{model}_{file}.py"
    if not path.exists():
        path.write_text(text_of(model, file), encoding="utf-8")
    return path


def text_of(model: str, file: str) -> str:
    """Return a file of a model: `first`, `half` or `all`."""
    with seeded(0):
        module, given, loss_fn = getattr(file_models, model)()
    batch = given_inputs(module, given, loss_fn).example
    assert batch is not None
    header = {"title": f"{file} of {model}.", "name": f"apply_{model}_{file}"}
    found = blocks.find_blocks(module, layers_fqn="blocks", module_classes=())
    if file == "first":
        return recomputing_file(list(found)[: len(found) // 2 + 1], **header)
    step = first_call.shadow_step(module, batch.inputs, dict(batch.keywords))
    operators = operator_modules.heavy_operators(step, {fqn: step.model.get_submodule(fqn) for fqn in found})
    kept = [each.result_bytes for of_block in operators.values() for each in of_block if each.can_be_kept]
    return rules_file(rules_for(operators, sum(kept) / 2 if file == "half" else math.inf), **header)


def finding(cell: Cell, predicted: Record | Exception, measured: Record) -> Finding:
    """Return what became of a cell."""
    named: dict[str, Any] = {"model": cell.model, "setting": cell.setting, "file": cell.file}
    if measured.memory is None or measured.work is None:
        said = "" if measured.error is None else measured.error.message
        return Finding(**named, verdict="refused" if measured.status == "refused" else "failed", said=said)
    assert measured.memory.baseline is not None
    said = str(predicted) if isinstance(predicted, Exception) else measured.reason or ""
    return Finding(
        **named,
        verdict=str(measured.verdict),
        said=said,
        mispredicted=None if isinstance(predicted, Exception) else tuple(differences(predicted, measured)),
        saved_bytes=measured.memory.saved_bytes,
        plain_saved_bytes=measured.memory.baseline.saved_bytes,
        recomputed_flops=measured.work.recomputed_flops or 0,
    )


def _predicted(experiment: Experiment) -> Record | Exception:
    try:
        return predict(experiment)
    except (ConfigError, StrategyError) as error:
        return error


def _protocol(chosen: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ("models", "settings", "files")} | {
        "overrides": _USUAL,
        "torch": torch.__version__,
    }


def _table(found: Sequence[Finding]) -> Table:
    return table_of(
        found,
        {
            "model": "model",
            "setting": "setting",
            "file": "file",
            "verdict": lambda row: f"{row.verdict} {row.said}".strip(),
            "mispredicted": lambda row: "-" if row.mispredicted is None else ", ".join(row.mispredicted),
            "saved": lambda row: f"{row.saved_bytes / max(row.plain_saved_bytes, 1):.1%}",
            "again": lambda row: f"{row.recomputed_flops / 1e6:.1f} M",
        },
        title="Written files in other settings",
        caption="saved: of the plain model's; again: FLOPs that run again",
    )

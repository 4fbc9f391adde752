"""Cells of pipelines: every variant under each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.trials import experiments
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.records.record import Record
from harness.trial.preflight import Preflight
from strategies import StrategyError
from tests.matrix.legality import outcome

MICROBATCHES = 4
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS = (
    "ac=none",
    "ac=full",
    "ac=full ac.offload=true",
    "ac=full ac.use_reentrant=true",
    "ac=full ac.split_backward=again",
    "ac=full ac.split_backward=torch",
    "ac=selective_layer ac.ac_freq=1",
    "ac=selective_op",
    "ac=selective_op ac.split_backward=torch",
    "ac=nested",
    "ac=offload",
    "ac=budget ac.fraction=0.8",
    "ac=torch_remat",
    "ac=compiler_budget",
)
"""Every variant that is no function of the user's, with the options that a schedule may ask about."""

_SPLIT = "ac.split_backward"
_SIZES = (
    "model=llama_nano",
    "model.n_layers=4",
    "model.width=32",
    "model.hidden_width=64",
    "model.dropout=0.1",
    "data=synthetic",
    "batch_size=8",
    "sequence_length=16",
    f"microbatches={MICROBATCHES}",
    "optimizer=sgd",
    "protocol=parity",
    "protocol.parity_steps=2",
    "protocol.probes=false",
    "mesh.device=cpu",
)
PLACES = tuple(f"mesh=pp2 mesh.pp_schedule={schedule}" for schedule in SCHEDULES)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A variant in a place, each as words of the command."""

    variant: str
    place: str

    @property
    def sizes(self) -> Sequence[str]:
        """Words of all cells."""
        return _SIZES

    @property
    def words(self) -> str:
        """What a command says to run it, beside the sizes."""
        return f"{self.variant} {self.place}"

    @property
    def schedule(self) -> str:
        """Schedule of the pipeline."""
        return self.place.partition("pp_schedule=")[2]

    @property
    def is_split(self) -> bool:
        """Whether its schedule takes a backward in two parts."""
        return self.schedule in {"zero_bubble", "zbv"}

    @cached_property
    def experiment(self) -> Experiment:
        """What the cell runs.

        Raises:
            ConfigError, StrategyError: the cell is refused.
        """
        (found,) = experiments([[*self.sizes, *self.words.split()]])
        Preflight().check(found)
        return found

    def refusal(self) -> str | None:
        """Return why the cell is refused before a rank starts; `None` where it is not."""
        try:
            _ = self.experiment
        except (ConfigError, StrategyError) as error:
            return str(error)
        return None

    def row(self, record: Record | None) -> dict[str, Any]:
        """Return what is kept of the cell: its ending, and what the table shows.

        Args:
            record: of its trial; `None` where it is refused.
        """
        if record is None:
            return {"words": self.words, "ending": f"refused: {self.refusal()}"}
        return {"words": self.words, "ending": outcome(record)} | self.costs(record)

    def costs(self, record: Record) -> dict[str, Any]:
        """Return what the table shows of a trial beside its ending; nothing of one that did not end."""
        memory, work = record.memory, record.work
        if memory is None or work is None or memory.pipeline is None or work.baseline is None:
            return {}
        each = [sum(counts.values()) for rank in memory.pipeline for counts in rank.forwards.values()]
        times = max(each) / MICROBATCHES - 1
        is_repeated = _SPLIT in self.variant and times > 2
        said = {"ending": f"{outcome(record)}, a block is recomputed {times:g} times"}
        return (said if is_repeated else {}) | {
            "forwards": [_most(rank.forwards) for rank in memory.pipeline],
            "flops": round(work.backward_flops / work.baseline.backward_flops, 4),
            "peaks": [rank.activation_peak_bytes for rank in memory.by_rank],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """An entry of the gallery that says how cells end.

    Fields:
        entry: module of the gallery.
        variant: words of the variant.
        ending: how the cell's ending begins, under a schedule with a backward in two parts.
    """

    entry: str
    variant: str
    ending: str


KNOWN_BAD = tuple(
    KnownBad(
        entry="p1_recomputed_for_each_group",
        variant=f"ac={variant} {_SPLIT}=torch",
        ending="neutral, a block is recomputed 10 times",
    )
    for variant in ("full", "selective_op")
)


def cells() -> Iterator[Cell]:
    """Yield all cells, those of one place together; options of a split backward stand where there is one."""
    for place in PLACES:
        found = (Cell(variant=variant, place=place) for variant in VARIANTS)
        yield from (cell for cell in found if cell.is_split or _SPLIT not in cell.variant)


def _most(forwards: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Return the forwards for a micro-batch of the block of a rank that runs most often, by what asked."""
    counts = max(forwards.values(), key=lambda each: sum(each.values()))
    return [count / MICROBATCHES for count in counts.values()]


def judgement(cell: Cell, ending: str) -> str:
    """Return `neutral`, `refused`, `known bad` or `unexpected`, by how a cell ended."""
    rule = known_bad(cell)
    if rule is not None:
        return "known bad" if ending.startswith(rule.ending) else "unexpected"
    word = ending.partition(":")[0]
    return word if word in {"neutral", "refused"} else "unexpected"


def known_bad(cell: Cell) -> KnownBad | None:
    """Return the entry that says how a cell ends, if any."""
    return next((rule for rule in KNOWN_BAD if rule.variant == cell.variant), None)

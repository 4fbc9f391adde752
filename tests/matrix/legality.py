"""The legality matrix: where each variant may stand, what it is known to do wrong there, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any

from bench.trials import experiments
from harness.errors import ConfigError
from harness.experiment.compilers import COMPILERS, ORDERS
from harness.experiment.experiment import WRAP_ORDERS, Experiment
from harness.records.record import Record
from harness.trial.preflight import Preflight
from strategies import Strategy, StrategyError, ac_variants
from strategies.chunk.tiles import Tiles
from tests.covering import Row, covering
from tests.matrix.facts import MESHES

JUDGEMENTS = ("neutral", "known bad", "refused", "unexpected")
DTYPES = ("fp32", "bf16", "bf16_mixed")
DROPOUTS = (0.0, 0.1)
SIZES = (
    "model=gpt_nano",
    "model.n_layers=2",
    "model.width=32",
    "model.hidden_width=64",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=16",
    "protocol=parity",
    "protocol.parity_steps=2",
    "protocol.probes=false",
    "mesh.device=cpu",
)
EXTRAS = ("deepspeed", "fairscale")
"""Variants of packages that suit any model, and that are not installed everywhere."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "compiler_budget": {"budget": 0.1},
    "megatron": {"modules": ("core_attn", "layernorm")},
    "modules": {"discard": ("*_norm",), "recompute": ("feed_forward",), "offload": ("attention.wo",)},
}
"""Options of variants that need some. The budget is one under which the compiler recomputes some of so small
a model."""
VARIANTS = tuple(
    name
    for name, variant in ac_variants.items()
    if name in (*OPTIONS, *EXTRAS) or (name != "budget" and not variant.needs_instructions)
)
"""All but those of users' code and of packages for models of their own, and the one whose number of bytes
leaves so small a model not much choice."""
TILES = {"feed_forward": 4}
"""Tiles of each feed-forward where a cell has `chunk=tiles`."""

_OPTION_OF_FIELD = {
    "variant": "ac",
    "dropout": "model.dropout",
    "early_stop": "ac.early_stop",
    "preserve_rng_state": "ac.preserve_rng_state",
}

BATCH = {"none": 24, "aot_eager": 4, "inductor": 2}
"""Cells that run one after the other in one set of ranks, by compiler."""
COMPILED_STRENGTH = 3
"""Compiled cells that run hold every combination of so many values that any legal compiled cell has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell; a field that does not apply is `None`, so that equal experiments are one cell.

    Fields:
        variant: of AC.
        mesh: name of the mesh.
        wrap_order: of the experiment; `None` where the variant puts no region anywhere.
        compile, compile_order: of the experiment; no order where nothing is compiled, or no region stands.
        dtype: of the experiment.
        dropout: probability.
        early_stop, preserve_rng_state: of the variant; `None` where it has no such option.
        chunk: `tiles`, or `None` for no chunks.
    """

    variant: str
    mesh: str
    wrap_order: str | None
    compile: str
    compile_order: str | None
    dtype: str
    dropout: float
    early_stop: bool | None
    preserve_rng_state: bool | None
    chunk: str | None = None

    @property
    def row(self) -> Row:
        """Its values but for chunks, in order."""
        return tuple(asdict(self).values())[:-1]

    @property
    def words(self) -> str:
        """What a command says to run it, beside `SIZES`."""
        given = {_OPTION_OF_FIELD.get(name, name): value for name, value in asdict(self).items()}
        options = {f"ac.{name}": _said(value) for name, value in OPTIONS.get(self.variant, {}).items()}
        if self.chunk is not None:
            options["chunk.tiles"] = _said(TILES)
        said = {name: value for name, value in (given | options).items() if value is not None}
        return " ".join(f"{name}={str(value).lower()}" for name, value in said.items())

    def experiment(self) -> Experiment:
        """Return what the cell runs.

        Raises:
            ConfigError, StrategyError: the cell is refused.
        """
        base = _bases()[self.mesh]
        chosen = {"early_stop": self.early_stop, "preserve_rng_state": self.preserve_rng_state}
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        if "layers_fqn" in _options_of(self.variant):
            options["layers_fqn"] = base.model.layers_fqn
        return replace(
            base,
            model=replace(base.model, dropout=self.dropout),
            ac=ac_variants[self.variant](**options, **OPTIONS.get(self.variant, {})),
            chunk=base.chunk if self.chunk is None else Tiles(tiles=TILES),
            wrap_order=self.wrap_order or "inside_fsdp",
            compile=self.compile,
            compile_order=self.compile_order or "ac_first",
            dtype=self.dtype,
        )

    def refusal(self) -> str | None:
        """Return why the cell is refused before anything runs; `None` where it is not."""
        try:
            self.experiment()
        except (ConfigError, StrategyError) as error:
            return str(error)
        # what a look at the model shows is the same in all of these
        alike = replace(self, dtype="fp32", dropout=0.0)
        return _refusal_of_model(
            replace(alike, compile="none", compile_order=None) if self.compile_order else alike
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """A rule by which cells differ from their twin.

    Fields:
        name: what is wrong.
        entry: module of the gallery that shows it.
        link: thread upstream; empty where there is none.
        holds: whether a cell is such.
        parts: of the record that may differ first.
    """

    name: str
    entry: str
    link: str
    holds: Callable[[Cell], bool]
    parts: tuple[str, ...] = ("gradients",)

    @property
    def number(self) -> int:
        """The gallery's."""
        return int(self.entry[1:3])


def _draws_anew(cell: Cell) -> bool:
    """Whether a region around code that drops out is recomputed with other random numbers.

    A graph that holds the region holds the generator's states too. Regions of `nested` hold compiled blocks.
    """
    is_inside = cell.compile_order == "ac_first" and cell.variant != "nested"
    return cell.preserve_rng_state is False and cell.dropout > 0 and not is_inside


def _budget_draws_anew(cell: Cell) -> bool:
    return cell.variant == "compiler_budget" and cell.dropout > 0


def _leaves_autocast(cell: Cell) -> bool:
    """Whether a package recomputes without the autocast that forward has where FSDP casts nothing."""
    return cell.variant in EXTRAS and cell.dtype == "bf16_mixed" and cell.mesh in ("single", "ddp2", "tp2")


KNOWN_BAD = (
    KnownBad(
        name="dropout is drawn anew without the random numbers of forward",
        entry="n11_dropout_without_saved_rng",
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py",
        holds=_draws_anew,
    ),
    KnownBad(
        name="the partitioner recomputes dropout under a memory budget",
        entry="n26_memory_budget_redraws_dropout",
        link="https://github.com/pytorch/pytorch/issues/190758",
        holds=_budget_draws_anew,
    ),
    KnownBad(
        name="the package recomputes without the autocast of the CPU",
        entry="n34_own_recomputation_without_autocast",
        link="https://github.com/facebookresearch/fairscale/blob/v0.4.13/fairscale/nn/checkpoint/"
        "checkpoint_activations.py",
        holds=_leaves_autocast,
    ),
)
"""What cells are expected to do wrong; the first rule that holds counts."""


def known_bad(cell: Cell) -> KnownBad | None:
    """Return the rule by which a cell is wrong, if any."""
    return next((rule for rule in KNOWN_BAD if rule.holds(cell)), None)


def outcome(record: Record) -> str:
    """Return how a cell ended: its verdict and what differs first, or why it did not end well."""
    if record.error is not None:
        return f"{record.status}: {record.error.message}"
    first = None if record.parity is None else record.parity.first
    if record.verdict == "differs" and first is not None:
        return f"differs: {first.part}"
    if record.verdict == "neutral":
        return "neutral"
    return f"{record.verdict}: {record.reason}"


def judgement(cell: Cell, outcome: str) -> str:
    """Return which of `JUDGEMENTS` a cell gets that ended with `outcome`."""
    rule = known_bad(cell)
    kind, _, part = outcome.partition(": ")
    if kind == "refused":
        return "refused"
    if rule is not None:
        return "known bad" if kind == "differs" and part in rule.parts else "unexpected"
    return "neutral" if kind == "neutral" else "unexpected"


def unexpected(ran: Mapping[str, str], by_words: Mapping[str, Cell]) -> dict[str, str]:
    """Return what is wrong with each cell whose end is not the one that is known, by its words."""
    found = {}
    for words, ending in ran.items():
        rule = known_bad(by_words[words])
        if judgement(by_words[words], ending) == "unexpected":
            expected = "" if rule is None else f"; gallery {rule.number} says that it differs: {rule.name}"
            found[words] = f"{ending}{expected}"
    return found


def protocol() -> dict[str, Any]:
    """Return how cells are made and which of them run."""
    return {
        "overrides": SIZES,
        "options": OPTIONS,
        "tiles": TILES,
        "uncompiled": "every cell",
        "compiled": f"rows that hold every combination of {COMPILED_STRENGTH} values",
    }


def cells() -> list[Cell]:
    """Return all cells, uncompiled ones first, small meshes before large ones; then those with chunks."""
    found = product(
        [("none", None), *product(COMPILERS[1:], ORDERS)],
        MESHES,
        VARIANTS,
        WRAP_ORDERS,
        DTYPES,
        DROPOUTS,
        (True, False),
        (True, False),
    )
    plain = list(dict.fromkeys(map(_collapsed, found)))
    return [
        *(cell for cell in plain if cell.variant not in EXTRAS or cell.compile == "none"),
        *(replace(cell, chunk="tiles") for cell in plain if _stands_for_its_variant(cell)),
    ]


def to_run(legal: Sequence[Cell]) -> list[Cell]:
    """Return the cells that run, of those that are not refused, in their order.

    First rows that hold all pairs of values; then all uncompiled cells; then what compiled ones lack of
    combinations of `COMPILED_STRENGTH` values. Those that share ranks stand together.
    """
    compiling = {cell.variant for cell in legal if cell.compile != "none"}
    by_row = {cell.row: cell for cell in legal if cell.variant in compiling and cell.chunk is None}
    pairs = covering(list(by_row))
    uncompiled = [cell for cell in legal if cell.compile == "none"]
    compiled = [row for row, cell in by_row.items() if cell.compile != "none"]
    first = [row for row in pairs if by_row[row].compile != "none"]
    rest = covering(compiled, given=first, strength=COMPILED_STRENGTH)
    stages = [[by_row[row] for row in pairs], uncompiled, [by_row[row] for row in rest]]
    return list(dict.fromkeys(cell for stage in stages for cell in sorted(stage, key=_place)))


def _stands_for_its_variant(cell: Cell) -> bool:
    """Say whether the cell gets one with chunks: without AC, and with full AC as it is by default."""
    options = (cell.wrap_order, cell.early_stop, cell.preserve_rng_state)
    return cell.variant == "none" or (cell.variant == "full" and options == ("inside_fsdp", True, True))


def _said(value: Any) -> str:
    """Return a value as the command takes it."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{number}' for name, number in value.items())}}}"
    return str(value)


def _place(cell: Cell) -> tuple[bool, int]:
    return cell.compile != "none", MESHES.index(cell.mesh)


def _collapsed(values: tuple[Any, ...]) -> Cell:
    """Return the cell of a point of the product, without what does not apply to its variant."""
    compiler, mesh, variant, wrap_order, dtype, dropout, early_stop, preserve_rng_state = values
    has_regions = variant != "none" and ac_variants[variant].partitioner is Strategy.partitioner
    options = _options_of(variant)
    return Cell(
        variant=variant,
        mesh=mesh,
        wrap_order=wrap_order if has_regions else None,
        compile=compiler[0],
        compile_order=compiler[1] if has_regions else None,
        dtype=dtype,
        dropout=dropout,
        early_stop=early_stop if "early_stop" in options else None,
        preserve_rng_state=preserve_rng_state if "preserve_rng_state" in options else None,
    )


@cache
def _refusal_of_model(cell: Cell) -> str | None:
    try:
        Preflight().check(cell.experiment())
    except (ConfigError, StrategyError) as error:
        return str(error)
    return None


@cache
def _options_of(variant: str) -> frozenset[str]:
    return frozenset(field.name for field in fields(ac_variants[variant]))


@cache
def _bases() -> dict[str, Experiment]:
    """Return the experiment of each mesh without AC."""
    points = [[*SIZES, f"mesh={mesh}", "ac=none"] for mesh in MESHES]
    return dict(zip(MESHES, experiments(points), strict=True))

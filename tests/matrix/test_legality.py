"""The legality matrix: each variant in each place is refused, neutral, or wrong as the gallery says.

Every cell runs that is not compiled; of compiled ones rows that hold every combination of
`COMPILED_STRENGTH` values. A row of the test is a variant with a compiler and a mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from harness.experiment.compilers import COMPILERS
from strategies import ac_variants
from tests.gallery.entries import DEFECTS
from tests.matrix.facts import MESHES, Run
from tests.matrix.legality import (
    BATCH,
    EXTRAS,
    KNOWN_BAD,
    VARIANTS,
    Cell,
    cells,
    judgement,
    known_bad,
    outcome,
    to_run,
    unexpected,
)

REFUSED = {
    (
        "compile_order: ac_first does not suit mesh.tp=2: torch does not compile regions of "
        "sharded tensors; use compile_order=compile_first"
    ): 1_140,
    (
        "compile_order: ac_first needs wrap_order=inside_fsdp: with call_site regions stand "
        "around what is compiled; use compile_order=compile_first"
    ): 912,
    (
        "compile_order: compile_first hides all operators from ac=selective_op, and nothing is "
        "compiled around the modes that look for them; use compile_order=ac_first"
    ): 720,
    "wrap_order: outside_fsdp needs FSDP, but ddp2 shards nothing; use mesh=shard2 or inside_fsdp": 630,
    "wrap_order: outside_fsdp needs FSDP, but single shards nothing; use mesh=shard2 or inside_fsdp": 630,
    "wrap_order: outside_fsdp needs FSDP, but tp2 shards nothing; use mesh=shard2 or inside_fsdp": 630,
    (
        "compile_order: ac_first needs wrap_order=inside_fsdp: with outside_fsdp regions stand "
        "around what is compiled; use compile_order=compile_first"
    ): 456,
    "wrap_order: call_site does not suit Nested; use inside_fsdp": 432,
    (
        "wrap_order: call_site makes the model one region, and selective_layer chooses among "
        "blocks; use ac=full"
    ): 432,
    "compile: none leaves nobody to carry out ac=compiler_budget; use compile=aot_eager or inductor": 36,
    **{
        f"compile: ac={name} follows the operators of eager blocks; use compile=none, or ac=selective_op": 360
        for name in ("megatron", "modules")
    },
    **{
        f"wrap_order: call_site makes the model one region, and ac={name} names modules inside blocks; use "
        "inside_fsdp": 36
        for name in ("megatron", "modules")
    },
    (
        "mesh.tp: must be 1 for chunk=tiles, which plans operators of whole tensors and no collectives "
        "between them, got 2; use mesh=shard2 or chunk=none"
    ): 96,
    **{
        f"compile: {name} does not suit chunk=tiles, whose programs no compiler enters; use compile=none or "
        "chunk=none": 72
        for name in COMPILERS[1:]
    },
    (
        "mesh.tp: must be 1 for ac=compiler_budget, got 2: torch's partitioner cannot size the "
        "device mesh in graphs of sharded tensors; use mesh=shard2 or another ac"
    ): 24,
}
"""Cells that are refused before anything runs, by reason; without `EXTRAS`, which may not be installed."""
CELL = Cell(
    variant="full",
    mesh="single",
    wrap_order="inside_fsdp",
    compile="none",
    compile_order=None,
    dtype="fp32",
    dropout=0.1,
    early_stop=True,
    preserve_rng_state=True,
)
REDRAWN = replace(CELL, preserve_rng_state=False)
OF_BUDGET = replace(
    CELL, variant="compiler_budget", compile="aot_eager", early_stop=None, preserve_rng_state=None
)


@pytest.fixture(scope="module")
def reasons() -> Mapping[Cell, str | None]:
    """Return why each cell is refused; `None` where it is not."""
    return {cell: cell.refusal() for cell in cells()}


@pytest.fixture(scope="module")
def chosen(reasons: Mapping[Cell, str | None]) -> list[Cell]:
    """Return the cells that run, of those that are not refused."""
    return to_run([cell for cell, reason in reasons.items() if reason is None])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_cell_ends_as_is_known(
    run: Run, chosen: list[Cell], compiler: str, mesh: str, variant: str
) -> None:
    here = [cell for cell in chosen if (cell.compile, cell.mesh, cell.variant) == (compiler, mesh, variant)]
    if not here:
        pytest.skip("each of these cells is refused before anything runs")
    ran: dict[str, str] = {}
    for start in range(0, len(here), BATCH[compiler]):
        batch = here[start : start + BATCH[compiler]]
        found = run([cell.experiment() for cell in batch])
        ran |= {cell.words: outcome(record) for cell, record in zip(batch, found, strict=True)}
    assert unexpected(ran, {cell.words: cell for cell in here}) == {}


def test_every_refusal_is_known(reasons: Mapping[Cell, str | None]) -> None:
    found = [reason for cell, reason in reasons.items() if reason and cell.variant not in EXTRAS]
    assert Counter(found) == REFUSED


@pytest.mark.parametrize(
    ("cell", "outcome", "expected"),
    [
        pytest.param(CELL, "neutral", "neutral", id="right"),
        pytest.param(CELL, "refused: ac: no", "refused", id="refused by a rank"),
        pytest.param(CELL, "differs: gradients", "unexpected", id="a difference that no rule knows"),
        pytest.param(CELL, "inert: nothing was recomputed", "unexpected", id="without effect"),
        pytest.param(CELL, "failed: it raised", "unexpected", id="a crash"),
        pytest.param(REDRAWN, "differs: gradients", "known bad", id="wrong as known"),
        pytest.param(REDRAWN, "differs: loss", "unexpected", id="wrong in another way"),
        pytest.param(REDRAWN, "neutral", "unexpected", id="known to be wrong, and right"),
        pytest.param(OF_BUDGET, "differs: gradients", "known bad", id="the compiler's budget"),
    ],
)
def test_an_end_is_judged_by_what_is_known(cell: Cell, outcome: str, expected: str) -> None:
    assert judgement(cell, outcome) == expected


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        pytest.param({}, 11, id="a region without random numbers"),
        pytest.param({"dropout": 0.0}, None, id="nothing is drawn"),
        pytest.param({"preserve_rng_state": True}, None, id="random numbers are kept"),
        pytest.param(
            {"compile": "inductor", "compile_order": "compile_first"}, 11, id="around compiled code"
        ),
        pytest.param({"compile": "inductor", "compile_order": "ac_first"}, None, id="inside compiled code"),
        pytest.param(
            {"variant": "nested", "compile": "inductor", "compile_order": "ac_first"},
            11,
            id="nested regions hold compiled blocks",
        ),
    ],
)
def test_a_rule_holds_where_it_is_known_to(changes: dict[str, object], entry: int | None) -> None:
    rule = known_bad(replace(REDRAWN, **changes))  # type: ignore[arg-type]
    assert (rule and rule.number) == entry


def test_every_rule_has_its_entry_of_the_gallery_and_a_thread() -> None:
    assert {rule.entry for rule in KNOWN_BAD} <= set(DEFECTS)
    assert all(rule.link.startswith("https://github.com/") for rule in KNOWN_BAD)


def test_what_is_unexpected_is_told_with_what_was_expected() -> None:
    ran = {CELL.words: "inert: nothing", REDRAWN.words: "neutral"}
    assert unexpected(ran, {cell.words: cell for cell in (CELL, REDRAWN)}) == {
        CELL.words: "inert: nothing",
        REDRAWN.words: "neutral; gallery 11 says that it differs: "
        "dropout is drawn anew without the random numbers of forward",
    }


def test_equal_experiments_are_one_cell() -> None:
    found = cells()
    assert len(found) == len({cell.words for cell in found})
    given = {"accelerate", "file", "python", "torchtitan", "transformers", "trl"}
    assert {cell.variant for cell in found} == set(VARIANTS) == set(ac_variants) - given - {"budget"}
    for chunk in (None, "tiles"):
        plain = [
            cell for cell in found if (cell.variant, cell.compile, cell.chunk) == ("none", "none", chunk)
        ]
        assert len(plain) == 6 * 3 * 2  # meshes, dtypes, dropouts


def test_all_uncompiled_cells_run_and_of_the_others_all_triples() -> None:
    options = [
        cell
        for cell in cells()
        if cell.mesh in {"single", "tp2"} and cell.dtype == "fp32" and cell.chunk is None
    ]
    chosen = to_run(options)
    assert {cell for cell in options if cell.compile == "none"} <= set(chosen)
    triples = {(c.variant, c.mesh, c.compile) for c in options}
    assert {(c.variant, c.mesh, c.compile) for c in chosen} == triples
    assert len(chosen) < len(options)


def test_a_command_runs_a_cell_again() -> None:
    assert OF_BUDGET.words == (
        "ac=compiler_budget mesh=single wrap_order=inside_fsdp compile=aot_eager dtype=fp32 "
        "model.dropout=0.1 ac.budget=0.1"
    )
    named = replace(OF_BUDGET, variant="modules", compile="none", chunk="tiles")
    assert named.words == (
        "ac=modules mesh=single wrap_order=inside_fsdp compile=none dtype=fp32 model.dropout=0.1 chunk=tiles "
        "ac.discard=[*_norm] ac.recompute=[feed_forward] ac.offload=[attention.wo] "
        "chunk.tiles={feed_forward:4}"
    )
    assert CELL.refusal() is None
    assert replace(CELL, wrap_order="outside_fsdp").refusal() == (
        "wrap_order: outside_fsdp needs FSDP, but single shards nothing; use mesh=shard2 or inside_fsdp"
    )

"""The legality matrix: which cells there are, which run, and that an end that nobody knows is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.legality import Results, judgement, told, unexpected
from bench.legality_cells import KNOWN_BAD, Cell, cells, known_bad, to_run
from strategies import ac_variants
from tests.gallery.entries import DEFECTS

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
    assert {cell.variant for cell in found} == set(ac_variants) - {"budget"}
    plain = [cell for cell in found if cell.variant == "none" and cell.compile == "none"]
    assert len(plain) == 6 * 3 * 2  # meshes, dtypes, dropouts


def test_all_uncompiled_cells_run_and_of_the_others_all_triples() -> None:
    options = [cell for cell in cells() if cell.mesh in {"single", "tp2"} and cell.dtype == "fp32"]
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
    assert CELL.refusal() is None
    assert replace(CELL, wrap_order="outside_fsdp").refusal() == (
        "wrap_order: outside_fsdp needs FSDP, but single shards nothing; use mesh=shard2 or inside_fsdp"
    )


def test_the_rest_is_counted() -> None:
    results = Results(environment_id="", refused={"a": 2, "b": 1}, ran={"x": "neutral"}, legal=5, planned=4)
    assert told(results) == (
        "8 cells: 3 refused before anything runs, 5 legal; of these 4 are to run, 1 have; "
        "the same command continues"
    )

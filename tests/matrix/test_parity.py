"""Every variant on every model and mesh, with and without dropout, is bitwise neutral and does something.

`tests/parity/test_matrix.py` proves the same steps inside of standing ranks. These are whole trials: a case
counts when its verdict is `neutral`, so that a strategy without effect counts against it too.
"""

from __future__ import annotations

from itertools import product

import pytest

from bench.trials import UNBUDGETED, experiments
from harness.records.record import Record
from tests.matrix.facts import DROPOUTS, MESHES, MODELS, SIZES, Run

INERT = {("selective_op", 0.0): "inert, compared by bitwise"}
"""Of an MLP on two tensor ranks: the product that is kept is as large as the one that is freed."""


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_variant_is_neutral(run: Run, device: str, mesh: str, model: str) -> None:
    points = [*product(UNBUDGETED, DROPOUTS)]
    chosen = experiments(
        [
            f"model={model}",
            f"mesh={mesh}",
            f"ac={ac}",
            f"model.dropout={dropout}",
            *SIZES,
            f"mesh.device={device}",
        ]
        for ac, dropout in points
    )
    problems = dict(zip(points, map(problem, run(chosen)), strict=True))
    expected = INERT if model == "mlp" and "tp" in mesh else {}
    assert {point: found for point, found in problems.items() if found is not None} == expected


def problem(record: Record) -> str | None:
    """Say what keeps a case from counting; `None` when it is bitwise equal to its twin and neutral."""
    if record.error is not None:
        return f"{record.status}: {record.error.message}"
    if record.parity is None:
        return "nothing was compared"
    if record.parity.first is not None:
        return str(record.parity.first)
    if record.parity.level != "bitwise" or record.verdict != "neutral":
        return f"{record.verdict}, compared by {record.parity.level}"
    return None

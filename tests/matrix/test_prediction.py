"""What is predicted of a step is what is measured of it: every quantity, on the parity matrix.

A prediction runs the code of the trial on fake tensors and fake ranks; nothing of it is fitted. All trials
of a test are predicted first and measured after, in ranks of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bench.trials import UNBUDGETED, experiments
from tests.harness.records_fixture import record
from tests.matrix.facts import MESHES, MODELS, SIZES, Run
from tests.matrix.predicted import differences, findings, problem

COMPILERS = {"none": "", "aot_eager": "compile=aot_eager", "chunks": "chunk=budget chunk.fraction=0.7"}
"""Chunks are on one rank alone, and compile nothing."""
FIRST = "compile_order=compile_first"
"""On sharded tensors, where torch compiles no regions. It hides operators: `selective_op` is refused."""


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("mesh", "compiler"), [*product(MESHES, ("none", "aot_eager")), ("single", "chunks")]
)
def test_every_quantity_is_predicted(run: Run, mesh: str, compiler: str, model: str) -> None:
    hides = compiler == "aot_eager" and "tp" in mesh
    acs = [ac for ac in UNBUDGETED if not (hides and ac == "selective_op")]
    compiled = [*COMPILERS[compiler].split(), *([FIRST] if hides else [])]
    common = [f"model={model}", f"mesh={mesh}", *SIZES, "mesh.device=cpu", *compiled]
    found = findings(experiments([*common, f"ac={ac}"] for ac in acs), run)
    problems = {ac: problem(*each) for ac, each in zip(acs, found, strict=True)}
    assert problems == dict.fromkeys(acs)


def test_what_differs_is_named() -> None:
    measured = record()
    assert measured.memory is not None
    assert differences(measured, measured) == {}
    peak = measured.memory.peak_bytes
    predicted = replace(measured, memory=replace(measured.memory, peak_bytes=2 * peak))
    assert differences(predicted, measured) == {"peak_bytes": (2 * peak, peak)}
    assert problem(predicted, measured) == f"{{'peak_bytes': ({2 * peak}, {peak})}}"
    assert problem(replace(predicted, assumes=("equal shares",)), measured) is None

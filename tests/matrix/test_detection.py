"""Five silent defects and their controls, each a trial: what differs after one step, and the verdict.

Outputs and loss are right in all of them; gradients, buffers or operator counts are not.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from bench.trials import experiments
from harness.records.parity_result import PARTS
from tests.gallery.users.detected import SavesMutableMatmuls
from tests.matrix.facts import Run


@dataclass(frozen=True, slots=True)
class Case:
    """One trial.

    Fields:
        factory: function of `tests.gallery.users.detected`.
        ac: overrides of the variant; none for `SavesMutableMatmuls`.
        verdict: the one that it must get.
        differs: the parts that must differ after one step.
    """

    factory: str
    ac: str
    verdict: str
    differs: frozenset[str] = frozenset()


_SAVING_MM = "ac=selective_op ac.save_ops=[aten.mm.default]"
_GRADIENTS = frozenset({"gradients", "parameters"})
CASES = {
    "dropout drawn anew in recomputation": Case(
        "dropping", "ac=full ac.preserve_rng_state=false", "differs", _GRADIENTS | {"rng_state"}
    ),
    "its control: RNG state preserved": Case("dropping", "ac=full", "neutral"),
    "region depends on a call counter": Case("counter_read", "ac=full", "differs", _GRADIENTS | {"state"}),
    "counter that nothing reads, counted twice": Case(
        "counter_unread", "ac=full", "differs", frozenset({"state"})
    ),
    "saved matmul changed in place": Case("in_place", "", "differs", _GRADIENTS),
    "its control: changed out of place": Case("out_of_place", "", "neutral"),
    "batch statistics updated twice": Case("moving_statistics", "ac=full", "differs", frozenset({"buffers"})),
    "its control: statistics frozen": Case("frozen_statistics", "ac=full", "neutral"),
    "save list that never matches": Case("biased", _SAVING_MM, "inert"),
    "its control: save list that matches": Case("unbiased", _SAVING_MM, "neutral"),
}
_DETECTED = "tests.gallery.users.detected"
_COMMON = ("model=python", "model.layers_fqn=layers", "protocol=parity", "protocol.parity_steps=1")


@pytest.mark.slow
def test_every_verdict_is_right(run: Run, device: str) -> None:
    points = [
        [*_COMMON, f"mesh.device={device}", f"model.factory={_DETECTED}:{case.factory}", *case.ac.split()]
        for case in CASES.values()
    ]
    found = run(
        [
            each if case.ac else dataclasses.replace(each, ac=SavesMutableMatmuls())
            for case, each in zip(CASES.values(), experiments(points), strict=True)
        ]
    )
    said = {}
    for name, record in zip(CASES, found, strict=True):
        assert record.error is None, f"{name}: {record.error}"
        assert record.parity is not None, name
        said[name] = (
            record.verdict,
            frozenset(part for part in PARTS if not getattr(record.parity, part).equal),
        )
    assert said == {name: (case.verdict, case.differs) for name, case in CASES.items()}
    assert str(getattr(found[0].parity, "first", None)).startswith(
        "parity: gradient of 'layers.1.down.weight' differs first at (0, 0) on rank 0 in step 0: "
    )

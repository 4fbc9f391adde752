"""A difference is told by the defect that it looks like."""

from __future__ import annotations

import dataclasses

import pytest

from harness.measure.probes.likely_causes import CAUSES, Evidence, likely_cause
from harness.measure.probes.recomputed_values import Divergence

NOTHING = Evidence(
    part="gradients", name="w", probe="parity", differing={}, recomputed_ops=("aten.mm.default",),
    divergence=None,
)  # fmt: skip


def _value(operator: str) -> Divergence:
    return Divergence(operator=operator, module="layers.0", call=0, shape=(2,), has_run=True)


@pytest.mark.parametrize(
    ("seen", "begin"),
    [
        ({"differing": {"gradients": "w", "rng_state": "cpu"}}, "gallery 11 or 27: random numbers"),
        ({"part": "rng_state", "differing": {"rng_state": "cpu"}}, "gallery 28: the recomputation draws"),
        ({"part": "leak"}, "gallery 53 or 54: something keeps"),
        ({"differing": {"buffers": "queue", "gradients": "w"}}, "gallery 37 or 39 or 64: a buffer that"),
        ({"differing": {"state": "calls", "gradients": "w"}}, "gallery 16 or 36 or 38: an attribute that"),
        ({"differing": {"gradients": "w", "rng_state": "python"}}, "gallery 3 or 9: numbers of Python's"),
        ({"divergence": _value("aten.rand.generator")}, "gallery 4: the region draws"),
        ({"divergence": _value("aten.mul.Tensor")}, "gallery 5 or 6 or 7: the recomputation reads"),
        (
            {"part": "outputs", "expected": "Structure Output of 3"},
            "another set of outputs, such as no cache",
        ),
        ({"lost": ("w",), "recomputed_ops": ()}, "gallery 18 or 48: a reentrant region without"),
        ({"lost": ("w",), "gained": ("v",)}, "gallery 6: the recomputation takes another branch"),
        ({"part": "hides_error", "written": ("ema",)}, "gallery 23: a buffer that backward needs"),
        ({"part": "hides_error"}, "gallery 21: a tensor that autograd keeps"),
        ({"part": "hides_error", "recomputed_ops": ()}, "gallery 22: a host copy"),
        ({"probe": "between"}, "gallery 8: micro-batches in flight share state"),
        ({"differing": {"buffers": "norm.running_mean"}}, "gallery 12: batch statistics are updated twice"),
        ({"differing": {"buffers": "load"}}, "gallery 14: a buffer that counts"),
        (
            {"differing": {"buffers": "bias", "gradients": "w"}, "recomputed_ops": ("aten.topk.default",)},
            "gallery 13: a buffer that routes is updated in forward",
        ),
        ({"differing": {"state": "length of losses"}}, "gallery 15: a container grows"),
        ({"differing": {"state": "calls"}}, "gallery 32: a counter"),
    ],
)
def test_likely_cause(seen: dict[str, object], begin: str) -> None:
    found = likely_cause(dataclasses.replace(NOTHING, **seen))  # type: ignore[arg-type]
    assert found.startswith(f"looks like {begin}")


def test_nothing_known_is_said_by_nothing() -> None:
    assert likely_cause(NOTHING) == ""


def test_each_cause_has_a_remedy() -> None:
    assert [cause.title for cause in CAUSES if not cause.remedy] == []

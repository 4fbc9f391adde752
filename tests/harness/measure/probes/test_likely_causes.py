"""A difference is told by the defect that it looks like."""

from __future__ import annotations

import dataclasses

import pytest

from harness.measure.probes.changed_since import StateChange
from harness.measure.probes.likely_causes import CAUSES, Evidence, cause_of_inert, likely_cause
from harness.measure.probes.recomputed_values import Divergence

NOTHING = Evidence(
    part="gradients", name="w", probe="parity", differing={}, recomputed_ops=("aten.mm.default",),
    divergence=None,
)  # fmt: skip


def _value(operator: str) -> Divergence:
    return Divergence(operator=operator, module="layers.0", call=0, shape=(2,), has_run=True)


def _changed(kind: str) -> dict[str, object]:
    return {"changed": (StateChange(kind, "layers.0.state"),)}


def _read(kind: str) -> dict[str, object]:
    return {**_changed(kind), "divergence": _value("aten.mul.Tensor")}


@pytest.mark.parametrize(
    ("seen", "begin"),
    [
        (
            {"differing": {"gradients": "w", "rng_state": "cpu"}},
            "gallery 11 or 27 or 60 or 61: random numbers",
        ),
        ({"part": "rng_state", "differing": {"rng_state": "cpu"}}, "gallery 28: the recomputation draws"),
        ({"part": "leak"}, "gallery 53 or 54: something keeps"),
        ({"differing": {"buffers": "queue", "gradients": "w"}}, "gallery 37 or 39 or 64: a buffer that"),
        ({"differing": {"state": "calls", "gradients": "w"}}, "gallery 16 or 36 or 38: an attribute that"),
        (
            {"part": "state", "differing": {"state": "scale", "gradients": "w"}},
            "gallery 10: the recomputation leaves state",
        ),
        (
            {"differing": {"gradients": "w", "rng_state": "python"}},
            "gallery 3 or 9 or 59: numbers of Python's",
        ),
        ({"divergence": _value("aten.rand.generator")}, "gallery 4: the region draws"),
        (
            {"divergence": _value("aten.mul.Tensor")},
            "gallery 5 or 6 or 7 or 16 or 41: the recomputation reads",
        ),
        (
            {"divergence": _value("aten.mul_.Tensor")},
            "gallery 5 or 6 or 7 or 16 or 41: the recomputation reads",
        ),
        (
            {"divergence": _value("aten.mul_.Tensor"), "has_save_list": True},
            "gallery 55: what a save list keeps",
        ),
        (
            {"divergence": _value("aten._unsafe_view.default"), "has_save_list": True},
            "gallery 67: what a save list of torch keeps",
        ),
        (
            {"part": "outputs", "expected": "Structure Output of 3"},
            "another set of outputs, such as no cache",
        ),
        ({"part": "outputs", "is_of_calls": True}, "gallery 35 or 50: forward itself"),
        ({"lost": ("w",), "recomputed_ops": ()}, "gallery 18 or 19 or 48: a reentrant region trains"),
        ({"lost": ("w",), "gained": ("v",)}, "gallery 6 or 36: the recomputation takes another branch"),
        ({"lost": ("w",)}, "gallery 20 or 51 or 52: a region loses gradients"),
        ({"gained": ("w",)}, "gallery 42: a copy of a tied weight"),
        ({"part": "hides_error", **_changed("buffer")}, "gallery 23: a tensor that backward needs"),
        ({"part": "hides_error", **_changed("weight")}, "gallery 24: weights are changed"),
        ({"part": "hides_error"}, "gallery 21: a tensor that autograd keeps"),
        ({"part": "hides_error", "recomputed_ops": ()}, "gallery 22: a host copy"),
        ({"probe": "between"}, "gallery 8 or 43 or 66: micro-batches in flight share state"),
        ({"differing": {"buffers": "norm.running_mean"}}, "gallery 12: batch statistics are updated twice"),
        ({"differing": {"buffers": "load"}}, "gallery 14: a buffer that counts"),
        (
            {"differing": {"buffers": "bias", "gradients": "w"}, "recomputed_ops": ("aten.topk.default",)},
            "gallery 13: a buffer that routes is updated in forward",
        ),
        ({"differing": {"state": "length of losses"}}, "gallery 15: a container grows"),
        ({"differing": {"state": "calls"}}, "gallery 32: a counter"),
        ({"forward_ops": ("aten.rrelu_with_noise.default",)}, "gallery 1: rrelu as the last operator"),
        ({"is_compiled": True, **_changed("buffer")}, "gallery 25: the compiler recomputes from"),
        (
            {"is_compiled": True, "differing": {"gradients": "w", "rng_state": "cpu"}},
            "gallery 26: the compiler recomputes dropout",
        ),
        (
            {"differing": {"gradients": "w"}, **_changed("gradient hook")},
            "gallery 56 or 57: a hook of a weight",
        ),
        (_changed("attribute"), "gallery 49: what a region leaves in an attribute"),
        (_read("mode"), "gallery 58: a module is in another mode"),
        (_read("word"), "gallery 6: the recomputation reads a choice"),
        (_read("attribute"), "gallery 16 or 38 or 62: the recomputation reads an attribute"),
        (_read("iterator"), "gallery 40: the recomputation takes the next"),
        (_read("weight"), "gallery 7: the recomputation reads other weights"),
        (_read("context"), "gallery 5: the recomputation reads a context variable"),
        (_read("global"), "gallery 41: the recomputation reads a global switch"),
        (_read("input"), "gallery 44 or 45: an argument that the region holds"),
        (_read("autocast"), "gallery 34: the recomputation runs without the autocast"),
        (
            {"recomputed_ops": (), "unpacked": "other values for a float32 [6, 6]"},
            "gallery 46 or 47: what is saved for backward",
        ),
        (
            {"recomputed_ops": (), "unpacked": "other strides for a float32 [6, 6]"},
            "what is saved for backward comes back with other strides",
        ),
        ({"recomputed_ops": (), "functions": ("Fused",)}, "the variant computes by an autograd function"),
        ({"actual": "a tensor that was already unpacked once"}, "backward of a custom function asks"),
        ({"actual": "Trying to backward an extra time"}, "the graph is walked more than once"),
        (_read("argument"), "gallery 45: forward changes an argument"),
        ({"part": "recomputation", **_changed("argument")}, "gallery 45: forward changes an argument"),
    ],
)
def test_likely_cause(seen: dict[str, object], begin: str) -> None:
    found = likely_cause(dataclasses.replace(NOTHING, **seen))  # type: ignore[arg-type]
    assert str(found).startswith(f"looks like {begin}")


def test_nothing_known_is_said_by_nothing() -> None:
    assert likely_cause(NOTHING) is None


@pytest.mark.parametrize(
    "seen",
    [
        {"part": "outputs", "name": "(forward)", "is_of_calls": True},
        {"part": "outputs"},
        {"part": "outputs", "step": 1, "is_of_calls": True},
        {"recomputed_ops": ()},
        {"probe": "between", "recomputed_ops": ()},
        {"probe": "between", "name": "(backward)"},
        {"differing": {"buffers": "norm.running_mean"}, "recomputed_ops": ()},
    ],
    ids=[
        "a forward that raises",
        "outputs that nothing mends",
        "outputs of a later step",
        "gradients of a variant that recomputes nothing",
        "micro-batches of a variant that recomputes nothing",
        "a backward that raises with micro-batches in flight",
        "a buffer of a variant that recomputes nothing",
    ],
)
def test_no_cause_is_guessed_from_little(seen: dict[str, object]) -> None:
    assert likely_cause(dataclasses.replace(NOTHING, **seen)) is None  # type: ignore[arg-type]


def test_a_cause_that_needs_an_option_is_out_where_that_changes_nothing() -> None:
    seen = dataclasses.replace(NOTHING, lost=("w",), recomputed_ops=())
    assert "reentrant" in str(likely_cause(seen, ["use_reentrant=False"]))
    assert "a region loses gradients" in str(likely_cause(seen, []))


def test_each_cause_has_advice_or_an_option() -> None:
    assert [cause.title for cause in CAUSES if not (cause.advice or cause.option)] == []


def test_what_nobody_tried_is_a_guess() -> None:
    cause = likely_cause(dataclasses.replace(NOTHING, differing={"buffers": "norm.running_mean"}))
    assert cause is not None
    assert cause.untried == (
        "looks like gallery 12: batch statistics are updated twice; "
        "perhaps this helps, which was not tried: rewind=True, or freeze them"
    )


@pytest.mark.parametrize(
    ("reason", "begin"),
    [
        ("none of the operators it names ever fired", "gallery 31: a save list"),
        (
            "no byte saved, and nothing recomputed",
            "gallery 29 or 30 or 31 or 65: checkpointing never",
        ),
        ("frees nothing: 9 saved bytes, 8 without it", "regions that keep as much as their modules do"),
    ],
)
def test_what_a_variant_that_does_nothing_looks_like(reason: str, begin: str) -> None:
    assert str(cause_of_inert(reason)).startswith(f"looks like {begin}")

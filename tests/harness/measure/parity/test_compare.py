from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore  # torch.distributed does not export it to type checkers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.measure.parity.compare import Snapshot, compare, compare_steps, summarise
from harness.measure.parity.snapshot import Captured, Structure, flatten
from harness.records.parity_result import (
    PARTS,
    FirstDifference,
    Parity,
    PartParity,
    Weightless,
    describe_difference,
)
from strategies import Tolerance

NAN, INF = float("nan"), float("inf")
within = partial(Tolerance, reason="another order of sums")


def snapshot(**parts: Any) -> Snapshot:
    """Return a snapshot of nothing but a loss of 1 and the given parts, captured where they are tensors."""
    empty: dict[str, Any] = {part: {} for part in PARTS} | {"loss": {"loss": torch.tensor(1.0)}}
    given: dict[str, Any] = {"changed_state": frozenset({"loss"})} | {
        part: captured(leaves) for part, leaves in (empty | parts).items()
    }
    return Snapshot(**given)


def captured(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: Captured.of(leaf) if isinstance(leaf, Tensor) else leaf for name, leaf in leaves.items()}


def compared(
    expected: dict[str, Any], actual: dict[str, Any], *, tolerance: float | None = None
) -> PartParity:
    """Compare two sets of gradients."""
    one, other = snapshot(gradients=expected), snapshot(gradients=actual)
    accepted = None if tolerance is None else within(relative=tolerance)
    return compare(one, other, rank=1, step=2, tolerance=accepted).parts["gradients"]


def gradient(*values: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"w": torch.tensor(values, dtype=dtype)}


def on_device(leaves: dict[str, Any], device_type: str) -> dict[str, Any]:
    return {name: replace(leaf, device_type=device_type) for name, leaf in captured(leaves).items()}


def of_kind(leaves: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name: replace(leaf, kind=kind) for name, leaf in captured(leaves).items()}


class Opaque:
    """An object without an equality of its own."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (the untyped kind is what models return)

VECTOR = "Tensor float32 (2,) on cpu"

REJECTED = [
    # what differs | expected | actual | first: name, index, expected, actual
    ("missing key", {"v": 1, "w": 2}, {"v": 1}, ("w", None, "int 2", "absent")),
    ("extra key", {"v": 1}, {"v": 1, "w": 2}, ("w", None, "absent", "int 2")),
    ("nothing on one side", gradient(1, 2), {}, ("w", None, VECTOR, "absent")),
    ("other order", {"v": 1, "w": 2}, {"w": 2, "v": 1}, ("v", None, "'v' at position 0", "'w' there")),
    ("absent gradient", gradient(1, 2), {"w": None}, ("w", None, VECTOR, "None")),
    ("gradient out of nowhere", {"w": None}, gradient(1, 2), ("w", None, "None", VECTOR)),
    ("extra elements", gradient(1, 2), gradient(1, 2, 3), ("w", None, VECTOR, "Tensor float32 (3,) on cpu")),
    (
        "extra dimension",
        gradient(1, 2),
        gradient([1, 2]),
        ("w", None, VECTOR, "Tensor float32 (1, 2) on cpu"),
    ),
    ("no elements", gradient(1, 2), gradient(), ("w", None, VECTOR, "Tensor float32 (0,) on cpu")),
    (
        "other dtype",
        gradient(1, 2),
        gradient(1, 2, dtype=torch.bfloat16),
        ("w", None, VECTOR, "Tensor bfloat16 (2,) on cpu"),
    ),
    (
        "other device",
        gradient(1, 2),
        on_device(gradient(1, 2), "cuda"),
        ("w", None, VECTOR, "Tensor float32 (2,) on cuda"),
    ),
    (
        "other class of tensor",
        gradient(1, 2),
        of_kind(gradient(1, 2), "DTensor (Replicate(),) of (2,)"),
        ("w", None, VECTOR, "DTensor (Replicate(),) of (2,) float32 (2,) on cpu"),
    ),
    (
        "sparse",
        {"w": torch.ones(2)},
        {"w": torch.ones(2).to_sparse()},
        ("w", None, VECTOR, "Tensor (torch.sparse_coo) float32 (2,) on cpu"),
    ),
    ("tensor and number", {"w": torch.tensor(1)}, {"w": 1}, ("w", None, "Tensor int64 () on cpu", "int 1")),
    ("number of another type", {"w": 1}, {"w": True}, ("w", None, "int 1", "bool True")),
    ("other text", {"w": "a"}, {"w": "b"}, ("w", None, "str a", "str b")),
    ("other class of object", {"w": Opaque()}, {"w": None}, ("w", None, None, "None")),
    ("NaN number", {"w": 1.0}, {"w": NAN}, ("w", None, "float 1.0", "float nan")),
    ("last bit", gradient(1, 1), gradient(1, 1 + 2**-23), ("w", (1,), 1.0, 1 + 2**-23)),
    ("sign of zero", gradient(0.0), gradient(-0.0), ("w", (0,), 0.0, -0.0)),
    ("infinity", gradient(1, 2), gradient(1, INF), ("w", (1,), 2.0, INF)),
    ("infinity of the other sign", gradient(INF), gradient(-INF), ("w", (0,), INF, -INF)),
    ("element of a matrix", gradient([1, 2], [3, 4]), gradient([1, 2], [5, 4]), ("w", (1, 0), 3.0, 5.0)),
    ("scalar", {"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, ("w", (), 1.0, 2.0)),
    ("integer", gradient(7, dtype=torch.int64), gradient(8, dtype=torch.int64), ("w", (0,), 7, 8)),
    (
        "integer beyond float64",
        gradient(2**60, dtype=torch.int64),
        gradient(2**60 + 1, dtype=torch.int64),
        ("w", (0,), 2**60, 2**60 + 1),
    ),
    ("byte", gradient(255, dtype=torch.uint8), gradient(0, dtype=torch.uint8), ("w", (0,), 255, 0)),
    (
        "boolean",
        gradient(True, dtype=torch.bool),
        gradient(False, dtype=torch.bool),
        ("w", (0,), True, False),
    ),
    (
        "complex",
        gradient(1 + 2j, dtype=torch.complex64),
        gradient(1j, dtype=torch.complex64),
        ("w", (0,), "(1+2j)", "1j"),
    ),
    ("half", gradient(1, dtype=torch.bfloat16), gradient(2, dtype=torch.bfloat16), ("w", (0,), 1.0, 2.0)),
    (
        "first of several",
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"a": torch.tensor([0.0, 3.0]), "b": torch.ones(2)},
        ("a", (1,), 0.0, 3.0),
    ),
]


@pytest.mark.parametrize(
    ("expected", "actual", "first"), [pytest.param(*row[1:], id=row[0]) for row in REJECTED]
)
def test_a_difference_is_found_and_named(
    expected: dict[str, Any], actual: dict[str, Any], first: tuple[str, Any, Any, Any]
) -> None:
    found = compared(expected, actual)
    assert not found.equal
    assert found.first_difference is not None
    name, index, one, other = first
    assert (found.first_difference.rank, found.first_difference.step) == (1, 2)
    assert (found.first_difference.name, found.first_difference.index) == (name, index)
    assert one is None or repr(found.first_difference.expected) == repr(one)
    assert repr(found.first_difference.actual) == repr(other)


@pytest.mark.parametrize(
    ("one", "other"), [(gradient(NAN, 1), gradient(2, 1)), (gradient(2, 1), gradient(NAN, 1))]
)
def test_a_nan_on_one_side_is_infinitely_far(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = compared(one, other)
    assert (found.equal, found.max_abs, found.max_rel) == (False, INF, INF)
    assert found.first_difference is not None
    assert found.first_difference.index == (0,)


NAN_OF_ANOTHER_SIGN = torch.tensor([NAN]).view(torch.int32).bitwise_xor(-(2**31)).view(torch.float32)

ACCEPTED = [
    ("nothing", {}, {}),
    ("the same bits", gradient(1, 2), gradient(1, 2)),
    ("other strides", {"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2).t()}),
    ("no elements", {"w": torch.ones(0, 3)}, {"w": torch.ones(0, 3)}),
    ("the same NaN in the same place", gradient(NAN, 1), gradient(NAN, 1)),
    ("the same infinities", gradient(INF, -INF), gradient(INF, -INF)),
    ("no gradient on both sides", {"w": None}, {"w": None}),
    ("NaN numbers", {"w": NAN}, {"w": NAN}),
    ("objects that only identity tells apart", {"w": Opaque()}, {"w": Opaque()}),
    ("functions", {"w": lambda: 1}, {"w": lambda: 2}),
    ("lazily conjugated", {"w": torch.tensor([1 + 1j]).conj()}, {"w": torch.tensor([1 - 1j])}),
    ("sparse", {"w": torch.eye(2).to_sparse()}, {"w": torch.eye(2).to_sparse()}),
]


@pytest.mark.parametrize(("expected", "actual"), [pytest.param(*row[1:], id=row[0]) for row in ACCEPTED])
def test_equal_things_raise_no_alarm(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert compared(expected, actual) == PartParity()


def test_bits_tell_one_nan_from_another() -> None:
    found = compared(gradient(NAN), {"w": NAN_OF_ANOTHER_SIGN})
    assert (found.equal, found.max_abs) == (False, 0.0)
    assert compared(gradient(NAN), {"w": NAN_OF_ANOTHER_SIGN}, tolerance=0.0).equal


DISTANCES = [
    # what | expected | actual | max_abs, max_rel
    ("relative to the largest of the tensor", gradient(1, 4), gradient(1.5, 4), 0.5, 0.125),
    ("negative values", gradient(-8, 1), gradient(-8, 3), 2.0, 0.25),
    ("from zero", gradient(0, 0), gradient(0, 2), 2.0, INF),
    ("sign of zero", gradient(0.0), gradient(-0.0), 0.0, 0.0),
    ("beside infinities", gradient(INF, 2), gradient(INF, 1), 1.0, 0.5),
    ("beside NaN", gradient(NAN, 2), gradient(NAN, 1), 1.0, 0.5),
    ("complex", gradient(2j, dtype=torch.complex64), gradient(1j, dtype=torch.complex64), 1.0, 0.5),
    (
        "largest tensor counts",
        gradient(1) | {"v": torch.ones(1)},
        gradient(2) | {"v": torch.ones(1) * 5},
        4.0,
        4.0,
    ),
    ("another shape has no distance", gradient(1), gradient(1, 2), 0.0, 0.0),
]


@pytest.mark.parametrize(
    ("expected", "actual", "max_abs", "max_rel"), [pytest.param(*row[1:], id=row[0]) for row in DISTANCES]
)
def test_distances_are_exact(
    expected: dict[str, Any], actual: dict[str, Any], max_abs: float, max_rel: float
) -> None:
    found = compared(expected, actual)
    assert (found.equal, found.max_abs, found.max_rel) == (False, max_abs, max_rel)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 100])
def test_the_index_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("harness.measure.parity.compare._BLOCK", block)
    actual = torch.arange(12.0).reshape(3, 4)
    actual[1, 2] += 1
    actual[2, 3] += 2
    found = compared({"w": torch.arange(12.0).reshape(3, 4)}, {"w": actual})
    assert found.first_difference is not None
    assert (found.first_difference.index, found.first_difference.expected) == ((1, 2), 6.0)
    assert (found.max_abs, found.max_rel) == (2.0, 2 / 11)


TOLERATED = [
    # what | expected | actual | tolerance | index of the first difference, None where it is accepted
    ("within", gradient(1, 4), gradient(1.5, 4), 0.125, None),
    ("beyond", gradient(1, 4), gradient(1.5, 4), 0.124, (0,)),
    ("first beyond, not first different", gradient(1, 4), gradient(1.1, 5), 0.125, (1,)),
    ("a limit that rounding moves", gradient(0, 3), gradient(0.3, 3), 0.1, (0,)),
    ("sign of zero", gradient(0.0), gradient(-0.0), 0.0, None),
    ("anything but zero beside zeros", gradient(0, 0), gradient(0, 1e-30), 0.5, (1,)),
    ("NaN on one side", gradient(1, 2), gradient(1, NAN), 1e9, (1,)),
    ("infinity on one side", gradient(1, 2), gradient(1, INF), 1e9, (1,)),
    ("integers are exact", gradient(100, dtype=torch.int64), gradient(101, dtype=torch.int64), 0.5, (0,)),
    ("complex within", gradient(4j, dtype=torch.complex64), gradient(5j, dtype=torch.complex64), 0.25, None),
]


@pytest.mark.parametrize(
    ("expected", "actual", "tolerance", "index"), [pytest.param(*row[1:], id=row[0]) for row in TOLERATED]
)
def test_a_tolerance_is_relative_to_the_largest_value(
    expected: dict[str, Any], actual: dict[str, Any], tolerance: float, index: tuple[int, ...] | None
) -> None:
    found = compared(expected, actual, tolerance=tolerance)
    assert found.equal == (index is None)
    assert (found.first_difference and found.first_difference.index) == index


def test_a_tolerated_distance_is_still_recorded() -> None:
    assert compared(gradient(1, 4), gradient(1.5, 4), tolerance=0.2) == PartParity(max_abs=0.5, max_rel=0.125)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        pytest.param(gradient(1, 2), {}, id="absence"),
        pytest.param(gradient(1, 2), gradient(1, 2, 3), id="shape"),
        pytest.param(gradient(1, 2), gradient(1, 2, dtype=torch.float64), id="dtype"),
        pytest.param({"v": 1, "w": 2}, {"w": 2, "v": 1}, id="order"),
        pytest.param({"w": 1.0}, {"w": 1.1}, id="plain numbers"),
    ],
)
def test_a_tolerance_loosens_nothing_but_values(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert not compared(expected, actual, tolerance=1e9).equal


FLOORED = [
    # what | tolerance | expected | actual | whether each part is equal
    ("noise beside a large tensor", within(relative=0.1, floor=0.01), 1e-9, -1e-9, True),
    ("as much as the floor allows", within(relative=0.1, floor=0.01), 0.0, 0.0625, True),
    ("more than the floor allows", within(relative=0.1, floor=0.01), 0.0, 0.125, False),
    ("without a floor noise counts", within(relative=0.1), 1e-9, -1e-9, False),
]


@pytest.mark.parametrize(
    ("tolerance", "expected", "actual", "is_equal"), [pytest.param(*row[1:], id=row[0]) for row in FLOORED]
)
def test_a_floor_is_a_share_of_the_largest_tensor_of_the_part(
    tolerance: Tolerance, expected: float, actual: float, is_equal: bool
) -> None:
    one, other = (
        snapshot(gradients={"large": torch.tensor([64.0]), "small": torch.tensor([value])})
        for value in (expected, actual)
    )
    assert compare(one, other, rank=0, step=0, tolerance=tolerance).parts["gradients"].equal is is_equal


@pytest.mark.parametrize(
    ("gradient_of_bias", "moved", "is_equal"),
    [
        pytest.param(1e-7, 0.002, True, id="a gradient of rounding moves by what the optimizer may"),
        pytest.param(1e-7, 0.003, False, id="and no further"),
        pytest.param(1e-3, 0.002, False, id="a gradient with a scale"),
        pytest.param(None, 0.002, False, id="no gradient"),
    ],
)
def test_a_parameter_drifts_where_its_gradient_is_rounding(
    gradient_of_bias: float | None, moved: float, is_equal: bool
) -> None:
    bias = None if gradient_of_bias is None else torch.tensor([gradient_of_bias])
    gradients = {"weight": torch.tensor([1.0]), "bias": bias}
    one, other = (
        snapshot(gradients=gradients, parameters={"weight": torch.tensor([1.0]), "bias": torch.tensor([by])})
        for by in (0.0, moved)
    )
    accepted = within(relative=1e-3, floor=1e-2, stride=0.0025)
    found = compare(one, other, rank=0, step=0, tolerance=accepted)
    assert found.parts["parameters"].equal == is_equal


def test_parameters_may_have_a_tolerance_of_their_own() -> None:
    one, other = (
        snapshot(gradients={"w": torch.tensor([value])}, parameters={"w": torch.tensor([value])})
        for value in (1.0, 1.05)
    )
    parts = compare(one, other, rank=0, step=0, tolerance=within(relative=0.01, parameters=0.1)).parts
    assert (parts["gradients"].equal, parts["parameters"].equal) == (False, True)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_compared(part: str) -> None:
    one, other = (snapshot(**{part: {"loss": torch.tensor(value)}}) for value in (0.0, 1.0))
    parts = compare(one, other, rank=0, step=0).parts
    assert [name for name, found in parts.items() if not found.equal] == [part]


def gradients_of_two_blocks(*values: float) -> Snapshot:
    """Return a snapshot of gradients in registration order: embedding, both blocks, head."""
    names = ("embedding", "a.weight", "b.weight", "head")
    gradients = {name: torch.tensor([float(value)]) for name, value in zip(names, values, strict=True)}
    return replace(
        snapshot(gradients=gradients),
        backward_order=names[::-1],
        blocks={"a": frozenset({"a.weight"}), "b": frozenset({"b.weight"})},
        checkpointed=frozenset({"a.weight", "b.weight"}),
    )


class TestTime:
    @pytest.mark.parametrize(
        ("other", "name", "blocks"),
        [
            pytest.param((2, 2, 2, 1), "b.weight", {"a": True, "b": True}, id="the later block comes first"),
            pytest.param((2, 2, 1, 1), "a.weight", {"a": True, "b": False}, id="the block nearest the cause"),
            pytest.param((2, 1, 1, 1), "embedding", {"a": False, "b": False}, id="before all blocks"),
        ],
    )
    def test_gradients_differ_in_the_order_of_backward(
        self, other: tuple[float, ...], name: str, blocks: dict[str, bool]
    ) -> None:
        one, two = gradients_of_two_blocks(1, 1, 1, 1), gradients_of_two_blocks(*other)
        first = summarise([compare(one, two, rank=0, step=0)]).first
        assert first is not None
        assert (first.part, first.name, first.blocks) == ("gradients", name, blocks)

    @pytest.mark.parametrize(
        ("steps_of_parts", "first"),
        [
            pytest.param({"outputs": 1, "gradients": 0}, ("gradients", 0), id="an earlier step"),
            pytest.param({"outputs": 0, "gradients": 0}, ("outputs", 0), id="within a step outputs"),
            pytest.param({"loss": 1, "parameters": 0}, ("parameters", 0), id="parameters of the step before"),
            pytest.param({"rng_state": 0, "state": 0}, ("state", 0), id="state before generators"),
            pytest.param({"input_gradients": 0, "buffers": 0}, ("input_gradients", 0), id="of inputs"),
        ],
    )
    def test_the_first_difference_is_the_first_in_time(
        self, steps_of_parts: dict[str, int], first: tuple[str, int]
    ) -> None:
        found = []
        for step in range(2):
            values: dict[str, Any] = {
                part: {"loss": torch.tensor(float(began <= step))} for part, began in steps_of_parts.items()
            }
            zeros: dict[str, Any] = {part: {"loss": torch.tensor(0.0)} for part in steps_of_parts}
            found.append(compare(snapshot(**zeros), snapshot(**values), rank=0, step=step))
        earliest = summarise(found).first
        assert earliest is not None
        assert (earliest.part, earliest.step) == first


class TestWeight:
    @pytest.mark.parametrize(
        ("steps_of_gradients", "expected"),
        [
            pytest.param([(1, 1, 1, 1)], Weightless(), id="gradients"),
            pytest.param([(0, 0, 0, 0)], Weightless(zero_from=0, zero_blocks_from=0), id="zeros"),
            pytest.param([(0, 0, 0, 0), (1, 1, 1, 1)], Weightless(), id="zeros at first"),
            pytest.param(
                [(1, 1, 1, 1), (0, 0, 0, 0)], Weightless(zero_from=1, zero_blocks_from=1), id="zeros later"
            ),
            pytest.param([(1, 0, 0, 1)], Weightless(zero_blocks_from=0), id="zeros in all blocks"),
            pytest.param([(1, 0, 1, 1)], Weightless(), id="zeros in one block"),
            pytest.param(
                [(1, 1, 1, 1), (NAN, NAN, 1, 1)],
                Weightless(not_finite_from=1, not_finite="a.weight"),
                id="NaN in one gradient",
            ),
            pytest.param(
                [(1, 1, INF, 1)], Weightless(not_finite_from=0, not_finite="b.weight"), id="infinity"
            ),
        ],
    )
    def test_what_gradients_prove(
        self, steps_of_gradients: list[tuple[float, ...]], expected: Weightless
    ) -> None:
        found = [
            compare(gradients_of_two_blocks(*values), gradients_of_two_blocks(*values), rank=0, step=step)
            for step, values in enumerate(steps_of_gradients)
        ]
        assert summarise(found).weightless == expected

    def test_only_what_is_recomputed_needs_a_gradient(self) -> None:
        found = replace(gradients_of_two_blocks(1, 0, 1, 1), checkpointed=frozenset({"a.weight"}))
        assert summarise([compare(found, found, rank=0, step=0)]).weightless == Weightless(zero_blocks_from=0)

    def test_blocks_without_parameters_to_train_expect_no_gradient(self) -> None:
        frozen = replace(gradients_of_two_blocks(1, 0, 0, 1), checkpointed=frozenset())
        assert summarise([compare(frozen, frozen, rank=0, step=0)]).weightless == Weightless()

    def test_no_gradient_at_all(self) -> None:
        none = snapshot(gradients={"w": None})
        assert summarise([compare(none, none, rank=0, step=0)]).weightless == Weightless(zero_from=0)


class TestSummary:
    def test_the_earliest_difference_and_the_largest_distance_stay(self) -> None:
        values = [(1.0, 1.0), (1.0, 1.25), (1.0, 3.0)]
        compared_steps = [
            compare(
                snapshot(gradients=gradient(one), loss={"loss": torch.tensor(one)}),
                snapshot(gradients=gradient(other), loss={"loss": torch.tensor(other)}),
                rank=0,
                step=step,
            )
            for step, (one, other) in enumerate(values)
        ]
        summary = summarise(compared_steps)
        first = FirstDifference(name="w", index=(0,), rank=0, step=1, expected=1.0, actual=1.25)
        assert summary.gradients == PartParity(equal=False, max_abs=2.0, max_rel=2.0, first_difference=first)
        assert (summary.level, summary.steps, summary.losses) == ("bitwise", 3, (1.0, 1.25, 3.0))
        assert not summary.is_equal

    def test_a_tolerance_is_stated_as_the_level(self) -> None:
        assert (
            summarise([compare(snapshot(), snapshot(), rank=0, step=0, tolerance=within(relative=0.1))]).level
            == "tolerance"
        )

    def test_no_step_proves_nothing(self) -> None:
        with pytest.raises(ValueError, match="parity: needs at least one compared step, got none"):
            summarise([])

    def test_too_few_steps_are_refused(self) -> None:
        with pytest.raises(ValueError, match="parity: asked for 3 steps, but only 2 were trained"):
            compare_steps(iter([snapshot()] * 3), iter([snapshot()] * 2), count=3)

    def test_json_has_text_for_what_json_lacks(self) -> None:
        one, other = snapshot(gradients=gradient(1.0)), snapshot(gradients=gradient(NAN))
        plain = summarise([compare(one, other, rank=0, step=0)]).as_json()
        assert json.loads(json.dumps(plain, allow_nan=False))["gradients"] == {
            "equal": False,
            "max_abs": "inf",
            "max_rel": "inf",
            "first_difference": {
                "name": "w",
                "index": [0],
                "rank": 0,
                "step": 0,
                "expected": 1.0,
                "actual": "nan",
                "position": 0,
            },
        }
        assert list(plain) == [
            *("level", "steps", "first", *PARTS, "losses", "absent", "uncompared", "weightless"),
            *("control", "compared", "chain", "first_module", "unreached"),
        ]


MESSAGES = [
    (
        "gradients",
        FirstDifference(
            name="layers.0.mlp.up.weight", index=(3, 17), rank=1, step=0, expected=0.125, actual=0.1252
        ),
        (
            "parity: gradient of 'layers.0.mlp.up.weight' differs first at (3, 17) on rank 1 in step 0: "
            "0.1250 vs 0.1252"
        ),
    ),
    (
        "gradients",
        FirstDifference(name="w", index=(0,), rank=0, step=0, expected=1.0, actual=1.0 + 2**-23),
        "parity: gradient of 'w' differs first at (0,) on rank 0 in step 0: 1.0000000 vs 1.0000001",
    ),
    (
        "buffers",
        FirstDifference(name="norm.count", index=(), rank=0, step=0, expected=1, actual=2),
        "parity: buffer 'norm.count' differs on rank 0 in step 0: 1 vs 2",
    ),
    (
        "outputs",
        FirstDifference(name="outputs[0]", index=(1,), rank=0, step=0, expected=0.0, actual=-0.0),
        "parity: output 'outputs[0]' differs first at (1,) on rank 0 in step 0: 0.000 vs -0.000",
    ),
    (
        "parameters",
        FirstDifference(name="w", index=(1,), rank=0, step=0, expected=0.5, actual="nan"),
        "parity: parameter 'w' differs first at (1,) on rank 0 in step 0: 0.5 vs nan",
    ),
    (
        "gradients",
        FirstDifference(name="w", index=None, rank=3, step=0, expected=VECTOR, actual="absent"),
        "parity: gradient of 'w' differs on rank 3 in step 0: Tensor float32 (2,) on cpu vs absent",
    ),
    (
        "rng_state",
        FirstDifference(name="cpu", index=(8,), rank=0, step=0, expected=1, actual=2),
        "parity: RNG state 'cpu' differs first at (8,) on rank 0 in step 0: 1 vs 2",
    ),
]


@pytest.mark.parametrize(("part", "difference", "message"), MESSAGES)
def test_the_message_names_part_item_place_rank_and_values(
    part: str, difference: FirstDifference, message: str
) -> None:
    assert describe_difference(part, difference) == message


@dataclass
class Output:
    """What a model may return."""

    logits: Tensor
    extra: Any = None


class TestFlatten:
    def test_containers_give_paths(self) -> None:
        value = OrderedDict(
            logits=torch.ones(1),
            state=[Output(torch.ones(2)), Pair(torch.ones(3), "text")],
            object=Opaque(x=torch.ones(4)),
        )
        assert {name: _shape(leaf) for name, leaf in flatten(value, "outputs").items()} == {
            "outputs": "OrderedDict of 3",
            "outputs['logits']": (1,),
            "outputs['state']": "list of 2",
            "outputs['state'][0]": "Output of 2",
            "outputs['state'][0].logits": (2,),
            "outputs['state'][0].extra": None,
            "outputs['state'][1]": "Pair of 2",
            "outputs['state'][1][0]": (3,),
            "outputs['state'][1][1]": "text",
            "outputs['object']": "Opaque of 1",
            "outputs['object'].x": (4,),
        }

    def test_one_tensor_has_the_name_of_the_whole(self) -> None:
        assert list(flatten(torch.ones(1), "outputs")) == ["outputs"]

    def test_a_cycle_ends(self) -> None:
        node = Opaque()
        node.__dict__["parent"] = node
        assert list(flatten(node, "outputs")) == ["outputs", "outputs.parent"]

    @pytest.mark.parametrize(
        ("one", "other", "name"),
        [
            pytest.param([torch.ones(1)], (torch.ones(1),), "outputs", id="list and tuple"),
            pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, "outputs", id="order of keys"),
            pytest.param([1, 2], [1, 2, 3], "outputs", id="another item"),
            pytest.param([], {}, "outputs", id="empty containers"),
            pytest.param({1: 0}, {"1": 0}, "outputs", id="types of keys"),
            pytest.param(Output(torch.ones(1)), Output(torch.zeros(1)), "outputs.logits", id="field"),
            pytest.param(
                Output(torch.ones(1), "a"), Output(torch.ones(1), "b"), "outputs.extra", id="plain field"
            ),
        ],
    )
    def test_other_structures_differ(self, one: Any, other: Any, name: str) -> None:
        expected, actual = (snapshot(outputs=flatten(value, "outputs")) for value in (one, other))
        found = compare(expected, actual, rank=0, step=0).parts["outputs"]
        assert found.first_difference is not None
        assert found.first_difference.name == name


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Captured):
        return tuple(leaf.value.shape)
    return str(leaf) if isinstance(leaf, Structure) else leaf


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    store = FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("single_rank_group")
def test_a_distributed_tensor_is_its_shard_and_its_placements() -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded, replicated = (
        DTensor.from_local(torch.ones(2), mesh, [placement]) for placement in (Shard(0), Replicate())
    )
    assert compared({"w": sharded}, {"w": sharded}) == PartParity()
    found = compared({"w": sharded}, {"w": replicated})
    assert found.first_difference is not None
    assert found.first_difference.expected == "DTensor (Shard(dim=0),) of (2,) float32 (2,) on cpu"
    assert found.first_difference.actual == "DTensor (Replicate(),) of (2,) float32 (2,) on cpu"


def test_outputs_that_one_of_two_never_has_are_absent() -> None:
    has, has_not = snapshot(outputs={"outputs": torch.ones(2)}), replace(snapshot(), outputs=None)
    compared = [compare(*pair, rank=0, step=0) for pair in ((has, has_not), (has_not, has), (has, has))]
    assert [step.absent for step in compared] == [("outputs",), ("outputs",), ()]
    assert summarise(compared[:1]).absent == ("outputs",)
    assert summarise(compared[:1]).is_equal
    assert has_not.to_host().outputs is None
    other = replace(has_not, gradients={"w": None})
    assert not summarise([compare(has, other, rank=0, step=0)]).is_equal


def test_the_whole_is_equal_when_all_parts_are() -> None:
    equal = PartParity()
    parts: dict[str, Any] = dict.fromkeys(PARTS, equal)
    whole = Parity(level="bitwise", steps=1, losses=(1.0,), **parts)
    assert whole.is_equal
    for part in PARTS:
        unequal: dict[str, Any] = {part: PartParity(equal=False)}
        assert not replace(whole, **unequal).is_equal

"""Results on fake tensors that are remembered are those that torch's kernels give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from strategies.tracing import fake_results
from strategies.tracing.fake_results import FakeCall
from strategies.tracing.fakes import Fakes

_aten = torch.ops.aten


class _Counting(Fakes):
    """Counts the operators that torch is asked about."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.asked: list[Any] = []

    def _run(self, func: Any, *rest: Any) -> Any:
        self.asked.append(func)
        return super()._run(func, *rest)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "_KNOWN", {})


def _facts(result: Any, operands: Sequence[Tensor]) -> list[object]:
    """Return what can be told of a result, with the operands that it is and that it shares a storage with."""
    found: list[object] = [list if isinstance(result, list) else tuple if isinstance(result, tuple) else None]
    for each in tree_leaves(result):
        if not isinstance(each, FakeTensor):
            found.append(each)
            continue
        storage = each.untyped_storage()
        found += [tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, each.device]
        found += [storage.nbytes(), each.is_conj(), each.is_neg(), each.requires_grad]
        found += [each is other for other in operands]
        found += [storage._cdata == other.untyped_storage()._cdata for other in operands]
        found += [torch._C._dispatch_key_set(each), vars(each)]
    return found


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        pytest.param(_aten.silu.default, (), id="a new tensor"),
        pytest.param(_aten.add.Tensor, (2,), id="a number"),
        pytest.param(_aten.add.Tensor, (2.5,), id="another number"),
        pytest.param(_aten.sum.dim_IntList, ([0, -1], True), id="a list of numbers"),
        pytest.param(_aten.view.default, ([4, 6],), id="a view"),
        pytest.param(_aten.view.default, ([1, 24],), id="a view with a size of 1"),
        pytest.param(_aten._unsafe_view.default, ([3, 8],), id="a view by another name"),
        pytest.param(_aten.slice.Tensor, (1, 1, 2), id="a view with an offset"),
        pytest.param(_aten.split.Tensor, (1,), id="a list of views"),
        pytest.param(_aten.native_layer_norm.default, ([4], None, None, 1e-5), id="a tuple"),
        pytest.param(_aten.mul_.Tensor, (3,), id="in place"),
        pytest.param(_aten._to_copy.default, (), id="a copy"),
        pytest.param(_aten.zeros_like.default, (), id="a tensor like another"),
        pytest.param(_aten.t.default, (), id="a transposed matrix"),
    ],
)
def test_an_equal_call_has_the_result_of_the_first(func: Any, rest: tuple[Any, ...]) -> None:
    mode = _Counting()
    with mode:
        first, second = (torch.empty(*([6, 4] if func is _aten.t.default else [2, 3, 4])) for _ in range(2))
        expected = _facts(func(first, *rest), [first])
        asked = [*mode.asked]
        actual = _facts(func(second, *rest), [second])
    assert mode.asked == asked
    assert actual == expected


def test_results_of_several_tensors_are_known_by_their_places() -> None:
    mode = _Counting()
    with mode:
        x, y = torch.empty(2, 3), torch.empty(2, 3)
        assert y.copy_(x) is y
        asked = len(mode.asked)
        assert x.copy_(y) is x
        assert len(mode.asked) == asked


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x + 1.0, id="type of a number"),
        pytest.param(lambda x: x.double() + 1, id="dtype"),
        pytest.param(lambda x: x[:1] + 1, id="shape"),
        pytest.param(lambda x: x.t() + 1, id="strides"),
        pytest.param(lambda x: torch.add(x, 1, alpha=2), id="a keyword"),
    ],
)
def test_another_call_is_not_known(other: Callable[[Tensor], Tensor]) -> None:
    mode = _Counting()
    with mode:
        x = torch.empty(4, 4)
        _ = x + 1
        before = mode.asked.count(_aten.add.Tensor)
        other(x)
    assert mode.asked.count(_aten.add.Tensor) == before + 1


def test_a_number_is_no_truth_value() -> None:
    with Fakes(allow_non_fake_inputs=True):
        x = torch.empty(3, dtype=torch.int64)
        assert (x + 1).dtype == (x + True).dtype == torch.int64
        assert (x * 1.0).dtype == torch.float32
        x = torch.empty(3, dtype=torch.bool)
        assert [(x + each).dtype for each in (True, 1, 1.0)] == [torch.bool, torch.int64, torch.float32]


def test_settings_are_part_of_a_call() -> None:
    with Fakes(allow_non_fake_inputs=True):
        x = torch.empty(3, dtype=torch.int64)
        assert (x / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (x / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            assert (x / 2).is_inference()
        assert not (x / 2).is_inference()


@pytest.mark.parametrize(
    ("func", "args"),
    [
        pytest.param(_aten.nonzero.default, (), id="a shape that depends on data"),
        pytest.param(_aten.unsqueeze_.default, (0,), id="another shape in place"),
        pytest.param(_aten.lift_fresh.default, (), id="a tensor from outside"),
        pytest.param(torch.ops.prim.device.default, (), id="no operator on tensors"),
    ],
)
def test_results_that_follow_from_more_are_not_remembered(func: Any, args: tuple[Any, ...]) -> None:
    mode = Fakes(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(2, 3)
    assert FakeCall.of(mode, _aten.neg.default, (x,), {}) is not None
    assert FakeCall.of(mode, func, (x, *args), {}) is None


def test_operands_that_torch_has_more_to_say_of_are_none_of_ours() -> None:
    mode, other = Fakes(allow_non_fake_inputs=True), Fakes(allow_non_fake_inputs=True)
    neg, real = _aten.neg.default, torch.ones(2)
    with mode:
        x, constant = torch.empty(2, 3), torch.tensor(1)
    with other:
        foreign = torch.empty(2)
    for each in (real, foreign, constant, x.to_sparse()):
        assert FakeCall.of(mode, neg, (each,), {}) is None
    assert FakeCall.of(mode, _aten.add_.Tensor, (x[0], x[1]), {}) is None


def test_a_known_result_has_no_memory_to_point_to() -> None:
    mode = _Counting()
    mode._allow_unsafe_data_ptr_access = False
    with mode:
        x = torch.empty(2)
        for each in (x, x + 1, x + 1):
            with pytest.raises(RuntimeError, match="data pointer"):
                each.data_ptr()


def test_what_gives_an_operand_another_size_is_asked_again() -> None:
    mode = _Counting()
    with mode:
        x = torch.empty(3)
        for _ in range(2):
            out = torch.empty(0)
            torch.add(x, 1, out=out)
            assert out.shape == (3,)
    assert mode.asked.count(_aten.add.out) == 2


def test_a_refused_call_is_refused_again() -> None:
    with Fakes(allow_non_fake_inputs=True):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shape"):
                torch.empty(2, 3).view(7)


def test_calls_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "_MOST", 2)
    with Fakes(allow_non_fake_inputs=True):
        x = torch.empty(2)
        for number in range(5):
            _ = x + number
            assert len(vars(fake_results)["_KNOWN"]) <= 2

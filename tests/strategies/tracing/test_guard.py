"""Guards: which calls are of one kind, and after which changes a recording holds no longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.estimate.patched import wrapped
from strategies.tracing.guard import (
    PROGRAMS,
    Call,
    Guard,
    Programs,
    kind_of_result,
    refuse_global_hooks,
    refuse_unseen,
    share_memory,
)

X, Y = torch.zeros(2, 3), torch.zeros(2, 3)


def _kind(*args: Any, **kwargs: Any) -> Any:
    return Call.of("chunk", args, kwargs).kind


KINDS: dict[str, tuple[Any, Any, bool]] = {
    "other values": (_kind(X), _kind(Y + 1), True),
    "one tensor twice": (_kind(X, X), _kind(X, Y), False),
    "the same ones are one": (_kind(X, Y, X), _kind(X, Y, Y), False),
    "another shape": (_kind(X), _kind(X[:1]), False),
    "another layout": (_kind(X), _kind(torch.zeros(3, 2).T), False),
    "another dtype": (_kind(X), _kind(X.double()), False),
    "a gradient": (_kind(X), _kind(X.clone().requires_grad_()), False),
    "a parameter": (_kind(X.clone().requires_grad_()), _kind(nn.Parameter(X)), False),
    "another number": (_kind(X, 1), _kind(X, 2), False),
    "a number of another type": (_kind(X, 1), _kind(X, True), False),
    "by name": (_kind(X, flag=1), _kind(X, 1), False),
    "another structure": (_kind([X, Y]), _kind((X, Y)), False),
}


@pytest.mark.parametrize(("one", "other", "is_equal"), KINDS.values(), ids=KINDS)
def test_kinds_of_calls(one: Any, other: Any, is_equal: bool) -> None:
    assert (one == other) is is_equal


SWITCHES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "attention by products": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_torch_are_of_the_kind(switch: str) -> None:
    with SWITCHES[switch]():
        assert _kind(X) != KINDS["other values"][0]


@pytest.mark.parametrize("value", [{1}, X.to_sparse(), object()])
def test_what_no_graph_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(StrategyError, match=r"^chunk: forward is called with a"):
        _kind(value)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = self.twin = nn.Parameter(torch.ones(3))
        self.flag: Any = True
        self.held = nn.ModuleDict({"one": self.linear})

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) * self.gain
        return outputs


PLACES = [("", "flag"), ("", "gain"), ("", "twin"), ("", "missing"), ("linear", "forward"), ("", "slope")]
PLACES += [("linear", "_forward_hooks"), ("linear", "weight"), ("", "_modules"), ("held.one", "bias")]


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda block: setattr(block, name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda _: None, True),
    "values": (lambda block: nn.init.zeros_(block.gain), True),
    "what nobody reads": (_set("other", 1), True),
    "a flag": (_set("flag", False), False),
    "nothing in the place of an attribute": (lambda block: delattr(block, "flag"), False),
    "an attribute that was not there": (_set("missing", None), False),
    "of the class": (lambda block: setattr(type(block), "slope", 1), False),
    "a hook": (lambda block: block.linear.register_forward_hook(print), False),
    "a forward": (lambda block: setattr(block.linear, "forward", torch.sin), False),
    "a class": (lambda block: setattr(block.linear, "__class__", type("Other", (nn.Linear,), {})), False),
    "one of two names": (_set("twin", nn.Parameter(torch.ones(3))), False),
    "a frozen weight": (lambda block: block.linear.requires_grad_(False), False),
    "another linear": (_set("linear", nn.Linear(3, 3)), False),
    "nothing on the way to a module": (lambda block: block.held.pop("one"), False),
}


@pytest.mark.parametrize(("change", "fits"), CHANGES.values(), ids=CHANGES)
def test_changes(change: Callable[[Any], Any], fits: bool) -> None:
    class Own(_Block):
        pass

    block, call = Own(), (X,)
    guard = Guard.of(block, call, PLACES)
    change(block)
    assert guard.fits(block, call) is fits


def test_a_forward_that_a_meter_follows_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    block = _Block()
    guard = Guard.of(block, (), PLACES)
    with wrapped(nn.Linear, "forward", lambda original, *args: original(*args)):
        assert guard.changed(block) is None
    monkeypatch.setattr(nn.Linear, "forward", functools.wraps(nn.Linear.forward)(lambda *_: X))
    assert guard.changed(block) == "linear.forward"


def test_what_python_does_depends_on_no_kind_of_tensor() -> None:
    block = _Block()
    guard = Guard.of(block, (), PLACES, is_exact=False)
    block.requires_grad_(False).double()
    assert guard.changed(block) is None
    block.linear.weight = None  # type: ignore[assignment]
    assert guard.changed(block) == "linear.weight"


def test_an_input_that_is_a_parameter_of_the_module() -> None:
    block = _Block()
    other = (nn.Parameter(torch.ones(3)),)
    assert not Guard.of(block, other, PLACES).fits(block, (block.gain,))


def test_blocks_that_are_alike_share_programs() -> None:
    one, other, call = _Block(), _Block(), (X,)
    guard = Guard.of(one, call, PLACES)
    assert not guard.fits(other, call)
    taken_over = guard.taken_over(other, call)
    assert taken_over is not None
    assert taken_over.fits(other, call)
    other.flag = False
    assert guard.taken_over(other, call) is None


def test_a_module_under_two_names_is_no_two_modules() -> None:
    one, other = _Block(), _Block()
    for block in (one, other):
        block.add_module("again", block.linear)
    guard = Guard.of(one, (X,), [("", "again"), *PLACES])
    assert guard.taken_over(other, (X,)) is not None
    for block in (one, other):
        block.linear = nn.Linear(3, 3)
    assert guard.taken_over(other, (X,)) is None
    assert not Guard.of(other, (X,), [("", "again"), *PLACES]).fits(one, (X,))


def test_a_forward_that_writes_to_inputs_wants_them_apart() -> None:
    rows = torch.zeros(4, 3)
    call = rows[:2], rows[2:]
    assert share_memory(call)
    assert Guard.of(_Block(), call, []).fits(_Block(), call)
    assert not Guard.of(_Block(), call, [], writes_to_inputs=True).fits(_Block(), call)


def test_kinds_of_results() -> None:
    kinds = [kind_of_result(each) for each in (X, (X,), {"a": X}, X.double(), X[:1], [X, None], [X, 1])]
    assert len(set(kinds)) == len(kinds)
    assert kind_of_result(X) == kind_of_result(Y + 1)


def test_as_many_programs_are_kept_as_are_of_use() -> None:
    programs: Programs[str] = Programs()
    for number in range(PROGRAMS + 1):
        programs.keep(number % 2, str(number))
    assert programs.latest == str(PROGRAMS)
    assert programs.find(1, lambda program: program) == str(PROGRAMS - 1)
    assert programs.find(0, lambda program: program if program == "0" else None) is None


def test_calls_that_nobody_sees_are_refused() -> None:
    block = _Block()
    refuse_unseen("chunk", "block", block)
    block.register_forward_hook(print)
    with pytest.raises(StrategyError) as refusal:
        refuse_unseen("chunk", "block", block)
    message = "chunk: 'block' has hooks, which a planned forward does not call; remove them"
    assert str(refusal.value) == message
    patched: Any = _Block()
    patched.forward = lambda x: x
    with pytest.raises(StrategyError) as refusal:
        refuse_unseen("chunk", "block", patched)
    problem = "'block' has a forward that is a function, whose state nobody watches; write it into a class"
    assert str(refusal.value) == f"chunk: {problem}"


def test_hooks_on_all_modules_are_refused() -> None:
    refuse_global_hooks("chunk")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(StrategyError) as refusal:
            refuse_global_hooks("chunk")
    finally:
        handle.remove()
    message = "chunk: needs a process without hooks on all modules, which would see other calls; remove them"
    assert str(refusal.value) == message

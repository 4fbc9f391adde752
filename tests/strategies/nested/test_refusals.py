"""What stands between the calls of a region: repeated as it was done, or refused by name."""

from __future__ import annotations

import random
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError
from strategies.ac.nested import Nested
from tests.strategies.nested.examination import ROWS, WIDTH, Case, Given, rows, step

INSIDE = (
    "ac: region {} changes in place what was made outside of it, by {!r}, "
    "so it cannot be recomputed; leave it outside"
)
BEHIND = (
    "ac: region {0} reads a tensor of [3, 4]{1}, which is later changed in place, "
    "so {0} cannot be recomputed; include that change in {0}"
)
OTHER = (
    "ac: {!r} ran with other parameters in forward than it has now; "
    "call it in a module that gives it these (torch.func.functional_call)"
)

SOMEWHERE = torch.ones(WIDTH)


class Tripled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * 5


class Passed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * 5


@dataclass
class Holder:
    x: Tensor


class OfHolder(nn.Module):
    def forward(self, holder: Any) -> Any:
        return Holder(holder.x)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class OnePart(nn.Module):
    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        return (x.mul_(2) + view.view(ROWS, WIDTH)).sin()


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: np.ndarray[Any, Any]) -> Tensor:
        return (x * torch.from_numpy(scale)).tanh()


class Saliency(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda y: y.sin().sum())(x)  # type: ignore[no-any-return]


def fills(self: Any, x: Tensor) -> Any:
    found = torch.zeros_like(x)
    for number, linear in enumerate((self.a, self.b)):
        is_here = torch.arange(ROWS) % 2 == number
        found[is_here] = linear(x[is_here])
    found.mul_(2)
    return found


def tallies(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    self.tally[1] += 1
    self.tally[2:] -= y.detach().sum()
    return self.b(y) * self.tally


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).sin()


class Counted:
    def __init__(self) -> None:
        self.count = 0


def under(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        with context():
            y = self.a(x)
        return self.b(y.float())

    return forward


def glue_under(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.a(x)
        with context():
            z = y * 2
        return self.b(y) + z

    return forward


def sets(name: str, value: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.a(x)
        setattr(self, name, value(y))
        return self.b(y)

    return forward


def adds_note(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    self.notes["latest"].append(y.detach())
    return self.b(y)


def counts_up(self: Any, x: Tensor) -> Any:
    self.count += 1
    return self.b(self.a(x))


def flags(self: Any, x: Tensor) -> Any:
    self.b.flag = 1
    return self.b(self.a(x))


def counts(self: Any, x: Tensor) -> Any:
    self.counted.count += 1
    return self.b(self.a(x))


def swaps(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    weight = self.b.weight
    del self.b._parameters["weight"]
    self.b.weight = weight * 2
    y = self.b(y)
    del self.b.weight
    self.b._parameters["weight"] = weight
    return y


def forks(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    with torch.random.fork_rng():
        y = functional.dropout(y, 0.5)
    return self.b(functional.dropout(y, 0.5))


def tries(self: Any, x: Tensor) -> Any:
    y = self.a(x)
    try:
        return self.b(y) if y.sum() > 0 else self.b(-y)
    except RuntimeError:
        return y * 0


def changes_later(self: Any, x: Tensor) -> Any:
    x = x * 1.0
    y = self.sine(x)
    x += y
    return self.b(x)


def changes_much_later(self: Any, x: Tensor) -> Any:
    x = x * 1.0
    y = self.b(self.sine(x))
    x += y
    return x


def changes_view(self: Any, x: Tensor) -> Any:
    x = x.sin()
    y = self.a(x.detach())
    x.view(-1).add_(1)
    return self.b(y) + x


def changes_view_made_before(self: Any, x: Tensor) -> Any:
    x = x.sin()
    flat = x.view(-1)
    y = self.a(x.detach())
    flat.add_(1)
    return self.b(y) + x


def normalises(self: Any, x: Tensor) -> Any:
    mean, var = self.norm.running_mean, self.norm.running_var
    return self.b(functional.batch_norm(self.a(x), mean, var, training=True))


def sets_gradient_flag(self: Any, x: Tensor) -> Any:
    y = self.a(x).detach()
    y.requires_grad = True
    return self.b(y)


REPEATED: dict[str, Case] = {
    "a branch over data": Case(forward=lambda self, x: self.b(self.a(x)) if self.a(x).sum() > 0 else x),
    "a number of a tensor": Case(forward=lambda self, x: self.b(x) * self.a(x).sum().item()),
    "a list of a tensor": Case(forward=lambda self, x: self.b(x) * self.a(x)[0].tolist()[0]),
    "a length that depends on data": Case(
        forward=lambda self, x: self.b(x) * (self.a(x) > 0).nonzero().shape[0], labels={"a": 0}
    ),
    "a comparison of tensors": Case(forward=lambda self, x: self.b(self.a(x)) if torch.equal(x, x) else x),
    "NumPy": Case(forward=lambda self, x: self.b(self.a(x)) * float(x.detach().numpy().sum())),
    "an array of NumPy": Case(forward=lambda self, x: self.b(self.a(x)) * torch.tensor(np.ones(WIDTH))),
    "a function of autograd": Case(forward=lambda self, x: self.b(Tripled.apply(self.a(x)))),
    "a function of autograd that does nothing forward": Case(
        forward=lambda self, x: self.b(Passed.apply(self.a(x)))
    ),
    "a hook on a tensor": Case(
        forward=lambda self, x: [(y := self.a(x)).register_hook(lambda g: g * 2), self.b(y)][1]
    ),
    "a backward in forward": Case(
        forward=lambda self, x: [(y := self.a(x)).sum().backward(retain_graph=True), self.b(y)][1]
    ),
    "a gradient read": Case(
        forward=lambda self, x: self.b(self.a(x)) * (1 if self.b.weight.grad is None else 2)
    ),
    "a place in memory": Case(forward=lambda self, x: self.b(self.a(x)) * (x.storage_offset() + 1)),
    "a tensor made to require a gradient": Case(forward=sets_gradient_flag),
    "a call of torch's checkpoint": Case(
        forward=lambda self, x: self.b(checkpoint(self.a, x, use_reentrant=False))
    ),
    "a call of torch's checkpoint, of a function": Case(
        forward=lambda self, x: self.b(checkpoint(lambda t: self.a(t) * 1, x, use_reentrant=False))
    ),
    "a call of torch's reentrant checkpoint": Case(
        forward=lambda self, x: self.b(checkpoint(lambda t: self.a(t) * 1, x, use_reentrant=True))
    ),
    "a call of torch's checkpoint around no label": Case(
        forward=lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=False), labels={"a": 0}
    ),
    "a call of torch's checkpoint around functions": Case(
        forward=lambda self, x: self.b(checkpoint(torch.sin, self.a(x), use_reentrant=False))
    ),
    "saved tensors on the host": Case(forward=under(save_on_cpu)),
    "a labelled call without gradients": Case(forward=under(torch.no_grad)),
    "functions without gradients": Case(forward=glue_under(torch.no_grad)),
    "autocast around a labelled call": Case(forward=under(lambda: torch.autocast("cpu", torch.bfloat16))),
    "autocast around functions": Case(forward=glue_under(lambda: torch.autocast("cpu", torch.bfloat16))),
    "a choice of attention kernels": Case(forward=glue_under(lambda: sdpa_kernel(SDPBackend.MATH))),
    "torch's generator seeded": Case(forward=lambda self, x: [torch.manual_seed(5), self.b(self.a(x))][1]),
    "torch's generator set back": Case(forward=forks),
    "random numbers of Python": Case(forward=lambda self, x: self.b(self.a(x) * random.random())),
    "random numbers of NumPy": Case(forward=lambda self, x: self.b(self.a(x) * float(np.random.rand()))),  # noqa: NPY002 (users do)
    "a generator of one's own": Case(
        forward=lambda self, x: self.b(self.a(x)) + torch.rand(WIDTH, generator=self.own()),
        more=lambda: {"own": torch.Generator},
    ),
    "a number counted up": Case(
        forward=counts_up,
        more=lambda: {"count": 0},
    ),
    "a new attribute": Case(forward=sets("latest", Tensor.detach)),
    "a new buffer": Case(
        forward=sets("mean", lambda y: y.detach().mean(0)), more=lambda: {"mean": torch.zeros(WIDTH)}
    ),
    "an attribute of a submodule": Case(forward=flags),
    "a list that grows": Case(forward=adds_note, more=lambda: {"notes": {"latest": []}}),
    "an object that counts": Case(forward=counts, more=lambda: {"counted": Counted()}),
    "a tensor of the surroundings": Case(forward=lambda self, x: self.b(self.a(x)) + SOMEWHERE),
    "a tensor in a list": Case(
        forward=lambda self, x: self.b(self.a(x)) + self.held[0],
        more=lambda: {"held": [torch.ones(WIDTH)]},
    ),
    "a module that is no submodule": Case(
        forward=lambda self, x: self.b(self.held[0](self.a(x))),
        more=lambda: {"held": [nn.Linear(WIDTH, WIDTH)]},
    ),
    "a mapped function": Case(forward=lambda self, x: self.b(torch.vmap(lambda row: row * 2)(self.a(x)))),
    "an ordered dictionary for a module": Case(
        forward=lambda self, x: self.b(self.same(OrderedDict(x=self.a(x)))["x"]),
        more=lambda: {"same": nn.Identity()},
        labels={"a": 0},
    ),
    "an object for a module": Case(
        forward=lambda self, x: self.b(self.of(Holder(self.a(x))).x),
        more=lambda: {"of": OfHolder()},
        labels={"a": 0},
    ),
    "an object that is given": Case(
        forward=lambda self, holder: self.b(self.a(holder.x)), args=lambda: (Holder(rows()),)
    ),
    "a mapping that is no dictionary": Case(
        forward=lambda self, batch: self.b(self.a(batch["x"])), args=lambda: (UserDict(x=rows()),)
    ),
    "a sparse tensor": Case(
        forward=lambda self, x: self.b(self.a(x.to_dense())), args=lambda: (torch.eye(WIDTH).to_sparse(),)
    ),
    "a running mean": Case(
        forward=lambda self, x: self.b(self.norm(x)),
        more=lambda: {"norm": nn.BatchNorm1d(WIDTH)},
        labels={"norm": 0},
    ),
    "a running mean without a count": Case(
        forward=lambda self, x: self.b(self.norm(x.T[None])[0].T),
        more=lambda: {"norm": nn.InstanceNorm1d(WIDTH, track_running_stats=True)},
        labels={"norm": 0},
    ),
    "a change in place behind an inner region": Case(
        forward=lambda self, x: changes_later(self, self.a(x)),
        more=lambda: {"sine": Sine()},
        labels={"a": 0, "sine": [0, 0], "b": 0},
    ),
    "an inner region that changes its input": Case(
        forward=lambda self, x: self.b(self.doubles(self.a(x))),
        more=lambda: {"doubles": InPlace()},
        labels={"a": [0, 0], "doubles": [0, 1], "b": [0, 2]},
    ),
    "an inner region, the last one, that changes its input": Case(
        forward=lambda self, x: self.doubles(self.b(self.a(x))),
        more=lambda: {"doubles": InPlace()},
        labels={"a": [0, 0], "b": [0, 1], "doubles": [0, 2]},
    ),
    "a change in place of an input": Case(
        forward=lambda self, x: [self.a(x), x.add_(1), self.b(x)][2],
        args=lambda: (torch.ones(ROWS, WIDTH),),
    ),
    "rows that are filled in": Case(forward=fills),
    "a buffer's row that counts up": Case(forward=tallies, more=lambda: {"tally": torch.zeros(WIDTH)}),
    "gradients of torch.func outside": Case(
        forward=lambda self, x: self.b(self.saliency(self.a(x))),
        more=lambda: {"saliency": Saliency()},
        labels={"a": 0, "b": 1},
    ),
    "a change in place right behind the region": Case(
        forward=changes_later, more=lambda: {"sine": Sine()}, labels={"sine": 0}
    ),
    "an expert that nobody asks": Case(forward=lambda self, x: self.a(x)),
    "an array for a module": Case(
        forward=lambda self, x: self.b(self.scaled(self.a(x), np.ones(WIDTH, "float32") * 2)),
        more=lambda: {"scaled": Scaled()},
        labels={"a": 0, "scaled": 0},
    ),
    "a running mean of a function": Case(forward=normalises, more=lambda: {"norm": nn.BatchNorm1d(WIDTH)}),
}


@pytest.mark.parametrize("case", REPEATED.values(), ids=REPEATED)
def test_a_region_repeats_what_was_done(case: Case) -> None:
    assert case.differences() == []


REFUSED: dict[str, tuple[Case, str]] = {
    "a parameter exchanged for a call": (Case(forward=swaps), OTHER.format("b")),
    "a functional call": (
        Case(
            forward=lambda self, x: torch.func.functional_call(
                self.b, {"weight": self.a.weight * 2}, (self.a(x),)
            )
        ),
        OTHER.format("b"),
    ),
    "gradients of torch.func in a region": (
        Case(
            forward=lambda self, x: self.b(self.saliency(self.a(x))),
            more=lambda: {"saliency": Saliency()},
            labels={"a": 0, "saliency": 0, "b": 0},
        ),
        (
            "ac: gradients of torch.func (test_refusals.py:LINE) stand in a region, or between modules, "
            "where torch takes none; call them in a module outside of all regions"
        ),
    ),
    "a change in place of an input and of its view": (
        Case(forward=lambda self, x: [y := x * 2, v := y[0], self.a(x), v.add_(1), y.mul_(2), self.b(y)][5]),
        INSIDE.format("0", "mul_"),
    ),
    "a change in place through a view": (Case(forward=changes_view), INSIDE.format("0", "add_")),
    "a change in place through an older view": (
        Case(forward=changes_view_made_before),
        INSIDE.format("0", "add_"),
    ),
    "a module that changes its input": (
        Case(
            forward=lambda self, x: self.b(self.doubles(self.a(x))),
            more=lambda: {"doubles": InPlace()},
            labels={"doubles": 0},
        ),
        INSIDE.format("0", "doubles"),
    ),
    "a change in place behind the region": (
        Case(forward=changes_much_later, more=lambda: {"sine": Sine()}, labels={"sine": 0}),
        BEHIND.format("0", " in 'sine' (test_refusals.py:LINE)"),
    ),
    "a change in place of one of two views": (
        Case(
            forward=lambda self, x: [y := self.a(x), self.b(self.pair(y, y.view(-1)))][1],
            more=lambda: {"pair": OnePart()},
            labels={"a": 0, "pair": [0, 0], "b": 0},
        ),
        (
            "ac: region 0_0 reads two tensors of one memory, and one is changed in place, "
            "so 0_0 cannot be recomputed; include in 0_0 what makes one of the other"
        ),
    ),
    "an embedding that is renormalised": (
        Case(
            forward=lambda self, tokens: self.b(self.embedding(tokens)),
            more=lambda: {"embedding": nn.Embedding(5, WIDTH, max_norm=0.5)},
            args=lambda: (torch.arange(3),),
            labels={"embedding": 0},
        ),
        INSIDE.format("0", "embedding"),
    ),
    "a label of nothing": (
        Case(forward=lambda self, x: self.b(self.a(x)), labels={"a": 0, "c": 0}),
        "ac.labels: 'c' names no submodule; submodules are: a, b",
    ),
    "a label of the model itself": (
        Case(forward=lambda self, x: self.b(self.a(x)), labels={"": 0}),
        "ac.labels: '' names no submodule; submodules are: a, b",
    ),
    "a label of what is not called": (
        Case(forward=lambda self, x: self.a(x), labels={"b": 0}),
        "ac.labels: 'b' is a submodule that forward does not call",
    ),
    "a region that begins again": (
        Case(forward=lambda self, x: self.b(self.c(self.a(x))), more=lambda: {"c": nn.Identity()}),
        (
            "ac.labels: region 0 ends at 'a' and begins again at 'b'; 'c' stands between: "
            "put what is between into the region, or give the second part another index"
        ),
    ),
}


@pytest.mark.parametrize(("case", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(case: Case, message: str) -> None:
    model = case.model()
    with pytest.raises(StrategyError) as error:
        case.step(Nested(labels=case.labels).apply(model), 0)
    assert re.sub(r"py:\d+", "py:LINE", str(error.value)) == message


def test_a_view_of_a_model_that_needs_data_is_refused() -> None:
    model = Given(lambda self, x: self.b(self.a(x)) if x.sum() > 0 else x)
    with pytest.raises(StrategyError) as error:
        Nested(labels={"a": 0}).view("regions", model, (rows(),))
    assert str(error.value).startswith("ac: the model cannot be followed without data: ")


def test_a_model_may_go_on_after_a_refusal() -> None:
    model = Given(lambda self, x, y=None: self.b(self.a(x) if y is None else self.a(self.b(self.a(x)))))
    Nested(labels={"a": 0}).apply(model)
    with pytest.raises(StrategyError):
        model(rows(), rows())
    step(model, rows())
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())

"""What a recording does not see of a forward is refused before a program stands in, and is silent without."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from strategies.ac.nested import Nested
from strategies.base import StrategyError
from strategies.chunk import ChunkPlan
from strategies.chunk.running.proof import Subject
from strategies.regions.region import regions

B, S, D, WIDE = 8, 6, 8, 64


class _Net(nn.Module):
    """Two linears; `between` is what no operator shows."""

    def __init__(self, between: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(D, WIDE), nn.Linear(WIDE, D), between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.between is not None and h.requires_grad:
            self.between(h)
        result: Tensor = self.down(h)
        return result


class _Checkpointed(_Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class _Configured(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.net, self.config = _Net(), config

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.config.scale * self.net(x)
        return result


class _Shares(nn.Module):
    """Its loop sets a value for each block on an object that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=3.0)
        self.layers = nn.ModuleList(_Configured(self.config) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers, 1):
            self.config.scale = float(number)
            x = layer(x)
        return x


class _Fills(nn.Module):
    """Its forward fills the list that is its default."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006 (what is tested)
        calls.append(1)
        result: Tensor = self.down(torch.tanh(self.up(x)) * len(calls))
        return result


def _clipped(h: Tensor) -> None:
    h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _scaled_before(h: Tensor) -> None:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (-gradients[0],))


_UNSEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a checkpoint of its own": (_Checkpointed, "the model (_Checkpointed)"),
    "a hook on a tensor": (
        lambda: _Net(_clipped),
        "the gradient of 'up.weight', which aten.t.default of 'up' reads,",
    ),
    "a hook on a node": (
        lambda: _Net(_scaled_before),
        "is 2.0e+00 off, where 0.001 of the largest is allowed",
    ),
    "a default": (_Fills, "'_Fills.forward.default 0' stands elsewhere afterwards"),
    "an object that blocks share": (_Shares, "result 0, of layers.2, is "),
}


@pytest.mark.parametrize("name", _UNSEEN)
def test_what_no_operator_shows_is_refused_in_the_plan(name: str) -> None:
    make, said = _UNSEEN[name]
    with pytest.raises(StrategyError) as refused:
        _planned(make())
    assert said in str(refused.value)
    assert "does not do as a program what its forward does: " in str(refused.value)


@pytest.mark.parametrize("name", _UNSEEN)
def test_what_is_planned_without_values_is_refused_at_the_first_call(name: str) -> None:
    model = _UNSEEN[name][0]()
    x = torch.randn(B, S, D)
    planned = ChunkPlan.make(copy.deepcopy(model).to("meta"), (x.to("meta"),), training=True).apply(model)
    state = torch.get_rng_state()
    with pytest.raises(StrategyError) as refused:
        planned(x)
    assert "does not do as a program what its forward does: " in str(refused.value)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", _UNSEEN)
def test_without_a_proof_it_is_silent(name: str) -> None:
    plain = _UNSEEN[name][0]()
    with mock.patch.object(Subject, "prove"):
        planned = _planned(copy.deepcopy(plain))
        results = [_results(model) for model in (plain, planned)]
    assert any(
        not torch.allclose(one, other, rtol=1e-2, atol=1e-3) for one, other in zip(*results, strict=True)
    )


def test_a_program_that_a_change_asks_for_is_proven() -> None:
    model = _planned(_Net())
    model.between = _clipped
    with pytest.raises(StrategyError) as refused:
        _results(model)
    assert "the gradient of input 0, which aten.view.default of 'up' reads, is " in str(refused.value)


_NEVER_CLOSE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "NaN": (lambda y: y * float("nan"), " is inf off, where 0.001 of the largest is allowed"),
    "inf": (lambda y: y / 0, " is inf off, where 0.001 of the largest is allowed"),
    "complex": (lambda y: y + 4j, ": it returns another structure, shape or dtype"),
    "bool": (lambda y: y > 0, ": it returns another structure, shape or dtype"),
    "dtype": (lambda y: y.double(), ": it returns another structure, shape or dtype"),
}


@pytest.mark.parametrize(("change", "said"), _NEVER_CLOSE.values(), ids=_NEVER_CLOSE)
def test_what_is_no_number_or_of_another_kind_is_refused(
    change: Callable[[Tensor], Tensor], said: str
) -> None:
    with mock.patch.object(Subject, "prove", autospec=True) as prove:
        _planned(_Net())
    subject, *inputs = prove.call_args.args
    other = replace(subject, program=lambda *args, **kwargs: change(subject.plain(*args, **kwargs)))
    with pytest.raises(StrategyError) as refused:
        other.prove(*inputs)
    assert said in str(refused.value)


def test_what_the_program_itself_raises_is_no_fault_of_the_forward() -> None:
    def raising(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("view size is not compatible")

    with mock.patch.object(Subject, "prove", autospec=True) as prove:
        _planned(_Net())
    subject, *inputs = prove.call_args.args
    with pytest.raises(StrategyError) as refused:
        replace(subject, program=raising).prove(*inputs)
    assert str(refused.value).endswith(
        "what its forward does: it raises RuntimeError: view size is not compatible; use chunk=none, and "
        "report it"
    )


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(D, D)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(D, WIDE), nn.Tanh(), nn.Linear(WIDE, D)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_each_distinct_scope_is_proven_once() -> None:
    with mock.patch.object(Subject, "prove", autospec=True, side_effect=Subject.prove) as prove:
        model = _planned(_Stack())
        assert [call.args[0].fqn for call in prove.call_args_list] == ["", "layers.0", "layers.3"]
        for length in (S, 2 * S, 3):
            model(torch.randn(B, length, D)).sum().backward()
        assert prove.call_count == 3  # other lengths are other programs of what is proven
        model.eval()
        with torch.no_grad():
            model(torch.randn(B, S, D))
        assert [call.args[0].fqn for call in prove.call_args_list[3:]] == ["", "layers.0", "layers.3"]


class _Draws(nn.Module):
    """Draws from generators of its own in a module that runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch = torch.Generator().manual_seed(0)
        self.linear: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape[-1], generator=self.torch)
        result: Tensor = self.linear(x) * float(self.numpy.random()) + self.python.random() * noise
        return result


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws, self.net, self.dropout = _Draws(), _Net(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(self.dropout(self.draws(x)))
        return result


def _states(model: Any) -> list[Any]:
    draws = model.draws
    own = draws.numpy.bit_generator.state, draws.python.getstate(), draws.torch.get_state().tolist()
    return [*own, torch.get_rng_state().tolist(), random.getstate()]


def test_generators_stand_as_in_the_plain_model() -> None:
    plain = _Noisy()
    model = copy.deepcopy(plain)
    before = _states(model)
    planned = _planned(model)
    assert _states(model) == before
    for _ in range(2):
        results = []
        for each in (plain, planned):
            torch.manual_seed(3)
            results.append((_results(each), _states(each)))
        torch.testing.assert_close(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]


class _Raises(_Net):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(super().forward(x), 0.5)
        if x.shape[1] > S:
            raise ValueError("too long")
        return h


def test_a_forward_that_raises_leaves_random_numbers_as_without_a_plan() -> None:
    plain = _Raises()
    planned = _planned(copy.deepcopy(plain))
    states = []
    for model in (plain, planned):
        torch.manual_seed(1)
        with pytest.raises(ValueError, match="too long"):
            model(torch.randn(B, S + 1, D, generator=torch.Generator()))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_proof_calls_no_hooks_and_leaves_gradients() -> None:
    model, calls = _Stack(), list[str]()
    x = torch.randn(B, S, D)
    model(x).sum().backward()
    gradients = [each.grad for each in model.parameters()]
    for fqn in ("", "layers.1"):
        model.get_submodule(fqn).register_forward_hook(lambda *_: calls.append(""))
    planned = _planned(model)
    assert calls == []
    assert all(each.grad is before for each, before in zip(model.parameters(), gradients, strict=True))
    planned(x)
    assert calls == ["", ""]


def test_regions_that_nest_hear_nothing_of_a_proof() -> None:
    plain = _Stack()
    nested = Nested(layers_fqn="layers").apply(_planned(copy.deepcopy(plain)))
    with mock.patch.object(Subject, "prove", autospec=True, side_effect=Subject.prove) as prove:
        found = _results(nested)  # inputs that want gradients have programs of their own
    assert prove.call_count
    torch.testing.assert_close(found, _results(plain))
    (region,) = regions(nested).values()
    plan = region.observe().plan
    assert plan is not None
    assert [(each["first"], each["last"]) for each in plan["regions"]] == [
        ("layers.0", "layers.1"),
        ("layers.2", "layers.3"),
    ]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "give", [weight_norm, spectral_norm, partial(prune.random_unstructured, name="weight", amount=0.5)]
)
def test_a_hook_that_makes_a_weight_makes_it_for_every_proof(give: Callable[..., nn.Module]) -> None:
    plain, other = _Noisy(), _Noisy()
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):  # torch copies no weight that a hook has made
        torch.manual_seed(1)
        model.draws.linear = give(nn.Linear(D, D))
    planned = _planned(other)
    for drops in (True, False):  # two programs; backward of the first one frees the graph of the weight
        results = []
        for model in (plain, planned):
            model.dropout.train(drops)
            torch.manual_seed(3)
            results.append(_results(model))
        torch.testing.assert_close(*results)


class _RaisesWithoutData(_Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if x.shape[1] > S and isinstance(h, FakeTensor):
            raise ValueError("without data")
        return h


def test_who_looks_for_what_a_forward_raises_calls_no_hooks() -> None:
    model, calls = _planned(_RaisesWithoutData()), list[str]()
    model.get_submodule("layers.1").register_forward_hook(lambda *_: calls.append(""))
    with pytest.raises(ValueError, match="without data"):
        model(torch.randn(B, S + 1, D))
    assert calls == []


def test_what_takes_too_much_memory_as_it_is_is_refused() -> None:
    def without_memory(h: Tensor) -> None:
        if not isinstance(h, FakeTensor):
            raise torch.OutOfMemoryError

    plan = ChunkPlan.make(_Net().to("meta"), (torch.ones(B, S, D, device="meta"),), training=True)
    with pytest.raises(StrategyError) as refused:
        plan.apply(_Net(without_memory))(torch.randn(2, S, D))
    assert str(refused.value) == (
        "chunk: the model (_Net) cannot be proven: as it is, its forward takes more memory than there is; "
        "plan with a smaller sample, as a plan holds for other lengths too"
    )


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (
            nn.LazyLinear(D),
            (torch.ones(B, D),),
            "'weight' is lazy and has no shape before a first call; call the",
        ),
        (
            nn.Sequential(nn.GRU(D, D)),
            (nn.utils.rnn.pack_sequence([torch.ones(3, D)]),),
            "'0' takes a packed sequence, which no graph can hold; pad it",
        ),
        (
            _Net(lambda h: h.register_hook(lambda gradient: print(float(gradient.sum())))),  # noqa: T201 (asks for a number)
            (torch.ones(B, S, D),),
            "a pass of the model cannot be followed without data in test_proof.py:",
        ),
    ],
    ids=["a lazy module", "a packed sequence", "a hook that asks for a number"],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(
    model: nn.Module, inputs: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(StrategyError) as refused:
        ChunkPlan.make(model, inputs, training=True)
    assert said in str(refused.value)


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.net = nn.Embedding(20, D, sparse=True), _Net()

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.net(self.embedding(tokens))
        return result


def test_a_sparse_gradient_is_that_of_the_plain_model() -> None:
    plain, tokens = _Sparse(), torch.arange(12).view(3, 4)
    planned = ChunkPlan.make(plain, (tokens,), training=True).apply(copy.deepcopy(plain))
    gradients = []
    for model in (plain, planned):
        model(tokens).square().sum().backward()
        gradients.append(model.embedding.weight.grad)  # type: ignore[union-attr]
    assert gradients[1].is_sparse  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[0].to_dense(), gradients[1].to_dense())  # type: ignore[union-attr, operator]


def test_an_older_checkpoint_is_run_as_it_is() -> None:
    class Block(_Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return result

    plain = nn.Sequential(nn.Linear(D, D), Block(), _Net())
    planned = _planned(copy.deepcopy(plain))
    torch.testing.assert_close(_results(planned), _results(plain))


def _planned(model: nn.Module) -> Any:
    return ChunkPlan.make(model, (torch.ones(B, S, D),), training=True).apply(model)


def _results(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, B * S * D).view(B, S, D).requires_grad_()
    outputs = model(x)
    outputs.square().sum().backward()
    assert x.grad is not None
    return [outputs.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class _Given(nn.Module):
    """Its layers take what `given` makes of a tensor, and `body` is what each of them does with it."""

    def __init__(self, given: Callable[[Tensor], tuple[Any, ...]], body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.given, self.pre = given, nn.Linear(D, D)
        self.layers = nn.ModuleList(_Gets(body) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, *others = self.given(self.pre(x))
        for layer in self.layers:
            x = layer(x, *others)
        return x


class _Gets(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.body = _Net(), body

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.body(self.net, x, *others)


def _marked(x: Tensor) -> tuple[Tensor]:
    x.kind = "first"  # type: ignore[attr-defined]
    return (x,)


def _by_mark(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = x + net(x) * (3.0 if getattr(x, "kind", "") == "first" else 1.0)
    return result


def _counted(net: nn.Module, x: Tensor, before: deque[float]) -> Tensor:
    before.append(1.0)
    result: Tensor = x + net(x) * len(before)
    return result


def _dropped(net: nn.Module, x: Tensor) -> Tensor:
    net(x)
    return x


@pytest.mark.parametrize(
    ("given", "body"),
    [
        pytest.param(_marked, _by_mark, id="an attribute of a tensor"),
        pytest.param(lambda x: (x, deque([1.0])), _counted, id="a deque"),
        pytest.param(lambda x: (x,), _dropped, id="a result that is dropped"),
    ],
)
def test_what_layers_take_is_that_of_the_plain_model(
    given: Callable[[Tensor], tuple[Any, ...]], body: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model, x = _Given(given, body), torch.randn(B, S, D)
    planned = copy.deepcopy(model)
    ChunkPlan.make(planned, (x,), training=True, fraction=0.6).apply(planned)
    results = [each(x) for each in (model, planned)]
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(results[1], results[0])
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)

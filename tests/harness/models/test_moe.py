from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.models import Batch, ModelSpec
from harness.models.moe import MoESpec
from harness.models.parts.expert_dispatch import slots
from harness.models.parts.feed_forward import RoutedExperts

MakeSpec = Callable[..., ModelSpec]


def routed(make_spec: MakeSpec, **changes: int) -> RoutedExperts:
    spec = make_spec("moe_nano", **changes)
    assert isinstance(spec, MoESpec)
    torch.manual_seed(0)
    return RoutedExperts(
        width=spec.width, hidden_width=spec.hidden_width, n_experts=spec.n_experts, top_k=spec.top_k
    )


def dense(layer: RoutedExperts, x_TD: Tensor) -> Tensor:
    """Return what the layer means: every expert on every token, those not chosen with weight 0."""
    weights_Tk, experts_Tk = layer.route(x_TD)
    gates_TE = torch.zeros(len(x_TD), len(layer.experts)).scatter(1, experts_Tk, weights_Tk)
    outputs_TED = torch.stack([expert(x_TD) for expert in layer.experts.children()], dim=1)
    return (gates_TE.unsqueeze(-1) * outputs_TED).sum(1)


def test_the_router_chooses_the_best_k(make_spec: MakeSpec) -> None:
    layer = routed(make_spec)
    x_TD = torch.randn(10, 128)
    weights_Tk, experts_Tk = layer.route(x_TD)
    scores_TE = layer.router(x_TD)
    assert experts_Tk.tolist() == [row.argsort(descending=True)[:2].tolist() for row in scores_TE]
    torch.testing.assert_close(weights_Tk.sum(-1), torch.ones(10))  # three roundings of a softmax
    assert (weights_Tk[:, 0] >= weights_Tk[:, 1]).all()


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_only_the_chosen_experts_count(make_spec: MakeSpec, top_k: int) -> None:
    layer = routed(make_spec, top_k=top_k)
    x_BSD = torch.randn(2, 5, 128)
    torch.testing.assert_close(layer(x_BSD).flatten(0, 1), dense(layer, x_BSD.flatten(0, 1)))  # other order


def test_an_expert_without_tokens_gets_zero_gradients(make_spec: MakeSpec) -> None:
    layer = routed(make_spec, n_experts=16, top_k=1)
    x_BSD = torch.randn(1, 2, 128)
    chosen = set(layer.route(x_BSD.flatten(0, 1))[1].flatten().tolist())
    layer(x_BSD).sum().backward()
    for index, expert in enumerate(layer.experts.children()):
        for weight in expert.parameters():
            assert weight.grad is not None
            assert bool(weight.grad.any()) is (index in chosen)


def test_a_step_repeats_bitwise(make_spec: MakeSpec, batch: Batch) -> None:
    spec = make_spec("moe_nano")
    torch.manual_seed(0)
    model = spec.build()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        spec.loss(model(*batch.inputs), batch).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    pairs = list(zip(*gradients, strict=True))
    assert all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def test_mixed_precision_routes_in_the_type_of_its_input(make_spec: MakeSpec) -> None:
    layer = routed(make_spec)
    x_BSD = torch.randn(1, 4, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x_BSD).dtype == torch.float32


@pytest.mark.parametrize(("capacity", "places"), [(0.5, 4), (1.0, 8), (1e20, 16)])
def test_an_expert_has_places_for_its_share_and_at_most_for_all_tokens(capacity: float, places: int) -> None:
    assert slots(torch.zeros(16, 2, dtype=torch.long), 4, capacity)[1] == places

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.models import Batch, ModelSpec
from harness.models.parts.attention import CausalSelfAttention

MakeSpec = Callable[..., ModelSpec]


def test_the_head_is_the_embedding(make_spec: MakeSpec, batch: Batch) -> None:
    spec = make_spec("gpt_nano")
    torch.manual_seed(0)
    model = spec.build().eval()
    normed: list[Tensor] = []
    model.get_submodule("norm").register_forward_hook(lambda *hook: normed.append(hook[2]))
    logits = model(*batch.inputs)
    assert torch.equal(logits, normed[0] @ model.get_parameter("embedding.weight").T)


def test_the_tie_survives_materialisation(make_spec: MakeSpec, batch: Batch) -> None:
    spec = make_spec("gpt_nano")
    torch.manual_seed(0)
    built = spec.build()
    with torch.device("meta"):
        materialised = spec.build()
    materialised.to_empty(device="cpu").load_state_dict(built.state_dict())
    for model in (built, materialised):
        spec.loss(model(*batch.inputs), batch).backward()  # type: ignore[no-untyped-call]
    grads = [model.get_parameter("embedding.weight").grad for model in (built, materialised)]
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_half_the_heads_are_half_the_sum() -> None:
    """A rank of tensor parallelism holds some heads; the ranks' outputs add up to the whole's."""
    torch.manual_seed(0)
    whole = CausalSelfAttention(width=32, n_heads=4, dropout=0.0).double()
    x_BSD = torch.randn(2, 5, 32, dtype=torch.float64)
    total = torch.zeros_like(x_BSD)
    for rank in range(2):
        part = CausalSelfAttention(width=32, n_heads=4, dropout=0.0).double()
        mine = slice(16 * rank, 16 * rank + 16)
        for name in ("wq", "wk", "wv"):
            linear, source = part.get_submodule(name), whole.get_submodule(name)
            linear.weight = torch.nn.Parameter(source.get_parameter("weight")[mine])
            linear.bias = torch.nn.Parameter(source.get_parameter("bias")[mine])
        part.wo.weight = torch.nn.Parameter(whole.wo.weight[:, mine])
        part.wo.bias = torch.nn.Parameter(whole.wo.bias / 2)
        total += part(x_BSD)
    torch.testing.assert_close(total, whole(x_BSD))  # sums of halves are rounded elsewhere

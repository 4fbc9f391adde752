"""A jagged nested tensor goes from block to block (pytorch/pytorch#145837, #141486)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies import Strategy, StrategyError
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_op import SelectiveOp

BEFORE = "full right, selective_op right, nested right, offload moves nothing, budget AttributeError"
RIGHT = "full right, selective_op right, nested right, offload right or refused, budget right or refused"


class Net(nn.Module):
    """Two blocks that get sequences of several lengths as one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return values of shape (rows, 8)."""
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        for block in self.blocks:
            x = x + block(x)
        return x.values()


def answer() -> str:
    """Train a step with each variant."""
    both = {
        "offload": _outcome(Offload(layers_fqn="blocks")),
        "budget": _outcome(Budget(layers_fqn="blocks", fraction=1.0)),
    }
    exact = {"full": Full, "selective_op": SelectiveOp, "nested": Nested}
    said = [f"{name} {_outcome(made(layers_fqn='blocks'))}" for name, made in exact.items()]
    said += [
        f"{name} right or refused" if found in {"right", "refused"} else f"{name} {found}"
        for name, found in both.items()
    ]
    return ", ".join(said)


def _outcome(variant: Strategy) -> str:
    inputs = torch.sin(torch.arange(72.0)).view(9, 8), torch.tensor([4, 2, 3])
    plain = Net()
    try:
        model = variant.apply(Net())
        for each in (plain, model):
            each(*inputs).square().mean().backward()
    except StrategyError:
        return "refused"
    except AttributeError:
        return "AttributeError"
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    if not all(torch.equal(one.grad, two.grad) for one, two in pairs):  # type: ignore[arg-type]
        return "other gradients"
    if isinstance(variant, Offload) and not variant.observe(model).offloaded_bytes:
        return "moves nothing"
    return "right"

"""Experts of `transformers` that ranks share, through the library's interface of implementations.

A class of experts whose forward goes through the interface stacks its weights along the first dimension,
and says in flags how they lie. One function here runs a single expert by these flags; dispatch
calls it with the rows of that expert. Before it is used, it is compared with the class's own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from harness.errors import ConfigError
from harness.models.parts.expert_dispatch import Expert, ExpertDispatch, RouterWatch, slots
from strategies import generators

_OVER_RANKS = "acbench_dispatch"
"""Name of experts that ranks share, in the interface of `transformers`."""

_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
"""Attributes that the interface gives each experts module."""

_TOKENS, _WIDTH, _HIDDEN = 6, 4, 3  # sizes of the comparison; two experts, of which tokens visit both
_ROUNDING = 1e-12  # of float64, relative to the largest


@dataclass(slots=True)
class StackedExperts:
    """An experts module of `transformers`.

    Fields:
        module: holds the weights.
        beside: modules next to it, of which one is its router.
        n_experts: their number E.
    """

    module: Any
    beside: tuple[nn.Module, ...]
    n_experts: int

    def share(self, own: range, dispatch: ExpertDispatch, watch: RouterWatch) -> None:
        """Keep the experts of this rank, by their numbers, and send tokens to those of others."""
        for name, stacked in self.module.named_parameters():
            part = stacked.detach()[own.start : own.stop].clone()
            setattr(self.module, name, nn.Parameter(part, requires_grad=stacked.requires_grad))
        self.module.dispatch, self.module.watch = dispatch, watch
        for each in self.beside:
            each.register_forward_hook(partial(_note_scores, watch, self.n_experts))
        self._run_here()

    def limit(self, capacity: float | None) -> None:
        """Keep all experts; each takes as many choices as if ranks shared them."""
        if capacity is not None:
            self.module.capacity = capacity
            self._run_here()

    def _run_here(self) -> None:
        ALL_EXPERTS_FUNCTIONS.register(_OVER_RANKS, _run)
        self.module.config._experts_implementation = _OVER_RANKS  # noqa: SLF001 (no public name)


def mixtures(model: nn.Module) -> dict[str, StackedExperts]:
    """Return the experts of a model that run by the interface, by the FQNs of the routers next to them."""
    found = {}
    for name, parent in model.named_modules():
        for child, module in parent.named_children():
            if all(hasattr(module, flag) for flag in _FLAGS):
                beside = tuple(each for each in parent.children() if each is not module)
                count = len(next(module.parameters()))
                routers = (own for own, each in parent.named_children() if "Router" in type(each).__name__)
                found[f"{name}.{next(routers, child)}"] = StackedExperts(module, beside, count)
    return found


def check_dispatch(model: nn.Module) -> None:
    """Refuse a model whose experts do not compute as the interface says.

    Args:
        model: a model, without memory.

    Raises:
        ConfigError: it has none of the interface, or a class computes otherwise.
    """
    found = mixtures(model)
    if not found:
        problem = f"{type(model).__name__} has no experts that go through transformers' interface of experts"
        raise ConfigError("mesh.ep", f"{problem}; use 1 without its options, or a class such as OlmoeConfig")
    for module in {type(each.module): each.module for each in found.values()}.values():
        why = _difference(module)
        if why is not None:
            problem = f"{type(module).__name__} {why}, so that a rank cannot run some of its experts"
            remedy = "use 1 without its options, or a class such as OlmoeConfig"
            raise ConfigError("mesh.ep", f"{problem}; {remedy}")


def _run(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a module where they are; the signature is that of the interface."""
    dispatch: ExpertDispatch | None = getattr(module, "dispatch", None)
    if dispatch is None:
        n_experts = len(next(module.parameters()))
        slots_Tk, most = slots(top_k_index, n_experts, module.capacity)
        return _own_forward(module, hidden_states, top_k_index, top_k_weights * (slots_Tk < most))
    return dispatch(hidden_states, top_k_weights, module.watch.visited(top_k_index), list(_experts(module)))


def _own_forward(module: Any, *operands: Tensor) -> Tensor:
    output: Tensor = type(module).forward.__wrapped__(module, *operands)
    return output


def _experts(module: Any) -> Iterator[Expert]:
    names, stacked = zip(*module.named_parameters(recurse=False), strict=True)
    for weights in zip(*(each.unbind(0) for each in stacked), strict=True):
        yield partial(_expert, module, dict(zip(names, weights, strict=True)))


def _expert(module: Any, weights: dict[str, Tensor], rows_ND: Tensor) -> Tensor:
    def linear(name: str, rows: Tensor) -> Tensor:
        weight, bias = weights[name], weights.get(f"{name}_bias")
        return nn.functional.linear(rows, weight.t() if module.is_transposed else weight, bias)

    up = linear("gate_up_proj" if module.has_gate else "up_proj", rows_ND)
    hidden = module._apply_gate(up) if module.has_gate else module.act_fn(up)  # noqa: SLF001 (the interface's)
    return linear("down_proj", hidden)


def _note_scores(watch: RouterWatch, n_experts: int, _module: nn.Module, _args: Any, output: Any) -> None:
    """Note the first tensor that has a number for each expert, of shape (T, E)."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.size(-1) == n_experts:
            watch.note(leaf.flatten(0, -2))
            return


def _difference(module: Any) -> str | None:
    """Return why two small experts of a class do not give, or get gradients of, what its own forward does.

    `None` where they do.
    """
    shapes = _shapes(module)
    own = {name for name, _ in module.named_parameters()}
    if own != shapes.keys():
        return f"has parameters other than the interface's, {', '.join(sorted(own ^ shapes.keys()))}"
    few = copy.deepcopy(module)
    few.num_experts = 2
    with generators.restored():
        torch.manual_seed(0)
        for name, shape in shapes.items():
            setattr(few, name, nn.Parameter(torch.randn(2, *shape, dtype=torch.float64)))
        rows_TD = torch.randn(_TOKENS, _WIDTH, dtype=torch.float64, requires_grad=True)
        weights_Tk = torch.rand(_TOKENS, 2, dtype=torch.float64)
    experts_Tk = torch.tensor([[0, 1], [1, 0]]).repeat(_TOKENS // 2, 1)
    by_choice_kTD = torch.stack(
        [
            torch.stack([expert(rows_TD) for expert in _experts(few)])[experts_Tk[:, choice], range(_TOKENS)]
            for choice in range(2)
        ]
    )
    here_TD = (by_choice_kTD * weights_Tk.t().unsqueeze(-1)).sum(0)
    try:
        own_TD = _own_forward(few, rows_TD, experts_Tk, weights_Tk)
    except (IndexError, RuntimeError, TypeError) as error:
        return f"does not run two small experts ({' '.join(str(error).split())})"
    read = [rows_TD, *few.parameters()]
    pairs = zip(
        (here_TD, *torch.autograd.grad(here_TD.sin().sum(), read)),
        (own_TD, *torch.autograd.grad(own_TD.sin().sum(), read)),
        strict=True,
    )
    if all((one - other).abs().max() <= _ROUNDING * other.abs().max() for one, other in pairs):
        return None
    return "computes otherwise than transformers' interface of experts says"


def _shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one expert's parameters in the comparison, by the interface's names."""
    first, wide = ("gate_up_proj", 2 * _HIDDEN) if module.has_gate else ("up_proj", _HIDDEN)
    sizes = {first: (wide, _WIDTH), "down_proj": (_WIDTH, _HIDDEN)}
    biases = {f"{name}_bias": (rows,) for name, (rows, _) in sizes.items()} if module.has_bias else {}
    return {**{name: size[::-1] if module.is_transposed else size for name, size in sizes.items()}, **biases}

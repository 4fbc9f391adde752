"""The region that recomputes: `torch.utils.checkpoint` around a module, both implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from strategies.base import Observation
from strategies.errors import StrategyError
from strategies.operators import SaveList
from strategies.policy import selective_contexts


@dataclass(kw_only=True, slots=True)
class Recomputation:
    """A region whose activations are dropped in forward and computed again in backward.

    Fields:
        fqn: plain FQN of the module, for messages.
        preserve_rng_state: recompute with the random numbers of forward.
        early_stop: end a recomputation when the last needed tensor is there (not reentrant).
        use_reentrant: the older implementation, which runs forward without autograd.
        save_list: operators whose outputs are kept; `None` keeps none.
        fired: entries of `save_list` that an operator in forward has matched, in any step.
    """

    fqn: str
    preserve_rng_state: bool
    early_stop: bool
    use_reentrant: bool
    save_list: SaveList | None = None
    fired: set[str] = field(default_factory=set)

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, recomputed in backward where gradients are asked for.

        Raises:
            StrategyError: reentrant, and no input requires grad though parameters do.
        """
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        if self.use_reentrant:
            return self._reentrant(module, body, args, kwargs)
        return self._non_reentrant(body, args, kwargs)

    def observe(self) -> Observation:
        """Return the named operators and those that have never fired here."""
        named = self.save_list.named if self.save_list is not None else ()
        return Observation(named=named, never_fired=tuple(n for n in named if n not in self.fired))

    def _non_reentrant(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # keyword tensors travel as positions: torch looks for devices with RNG state only there
        names, count = tuple(kwargs), len(args)

        def run(*inputs: Any) -> Any:
            return body(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

        return checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            context_fn=self._contexts if self.save_list is not None else noop_context_fn,
        )

    def _contexts(self) -> tuple[Any, Any]:
        assert self.save_list is not None
        return selective_contexts(self.save_list, self.fired)

    def _reentrant(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # this implementation sees neither keywords nor nested structures: both sides are flattened
        inputs, inputs_spec = tree_flatten((args, kwargs))
        if not _require_grad(inputs):
            if _require_grad(module.parameters()):
                raise StrategyError(
                    "ac.use_reentrant",
                    f"no input of {self.fqn!r} requires grad, so its parameters would get no gradient; "
                    "use ac.use_reentrant=false",
                )
            return body(*args, **kwargs)
        outputs_spec = None

        def run(*leaves: Any) -> tuple[Any, ...]:
            nonlocal outputs_spec
            positional, keywords = tree_unflatten(leaves, inputs_spec)
            outputs, outputs_spec = tree_flatten(body(*positional, **keywords))
            return tuple(outputs)

        outputs = checkpoint(run, *inputs, use_reentrant=True, preserve_rng_state=self.preserve_rng_state)
        assert outputs_spec is not None
        return tree_unflatten(outputs, outputs_spec)


def _require_grad(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(list(values)))

"""The policy of selective-op AC: which operator calls of one region call are saved.

torch looks a saved output up by operator and invocation index and does not run the operator again.
An operator that draws random numbers (attention with dropout) would then leave the generator where
recomputation found it, and every later dropout would differ from forward's, silently. So the
generator's state after each saved random operator is noted in forward and put back in recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from strategies.regions.operator_names import Operator, SaveList


def selective_contexts(
    save_list: SaveList, fired: set[str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of recomputation for one call of one region.

    Args:
        save_list: what is saved; every `save_list.recompute_every`-th counted matmul is not.
        fired: receives the entries of `save_list` that an operator of forward matches.
    """
    counted = {False: 0, True: 0}  # by whether recomputation asks: torch before 2.12 asks in both passes

    def policy(context: Any, operator: Operator, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Say whether torch saves or recomputes an operator.

        Products are counted apart in forward and again.
        """
        entries = save_list.entries_of(operator)
        if not entries:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            fired.update(entries)
        if save_list.recompute_every and operator in save_list.counted:
            counted[context.is_recompute] += 1
            if counted[context.is_recompute] % save_list.recompute_every == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    forward, recompute = create_selective_checkpoint_contexts(policy)
    if hasattr(forward, "respect_saved_tensors_hooks"):  # what torch tells it does not reach it below
        forward.respect_saved_tensors_hooks = False
    random = frozenset(operator for operator in save_list.operators if _is_random(operator))
    if not random or _is_traced():
        return forward, recompute
    states: deque[Tensor] = deque()  # of the generator, in forward

    def note(device: torch.device) -> None:
        states.append(_generator(device).get_state())

    def restore(device: torch.device) -> None:
        _generator(device).set_state(states.popleft())

    return _Inside(forward, AfterDraws(random, note)), _Inside(recompute, AfterDraws(random, restore))


class AfterDraws(TorchDispatchMode):
    """Calls `act`, of the device, after every operator of `random` that draws."""

    def __init__(self, random: frozenset[Operator], act: Callable[[torch.device], None]) -> None:
        super().__init__()
        self._random = random
        self._act = act

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and act where it has drawn random numbers."""
        out = func(*args, **(kwargs or {}))
        if func in self._random and _draws(func, args, kwargs or {}):
            self._act(next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)))
        return out


class _Inside(AbstractContextManager[None]):
    """One context within another, entered once: the mode entered last is asked first.

    What the contexts hold is let go with the last exit, before the region's graph is.
    """

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._waiting = [outer, inner]
        self._entered = ExitStack()

    def __enter__(self) -> None:
        """Enter the contexts of a recomputation, of which each backward has one."""
        if not self._waiting:  # in the words of torch, whose modes would say it
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any region "
                "computed under selective activation checkpoint."
            )
        while self._waiting:
            self._entered.enter_context(self._waiting.pop(0))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)


def _is_traced() -> bool:
    """Whether a compiler records the region; it keeps the states of random operators in the graph itself."""
    proxies = torch._C._TorchDispatchModeKey.PROXY  # noqa: SLF001 (`checkpoint` asks so too)
    return torch._C._get_dispatch_mode(proxies) is not None  # noqa: SLF001 (as above)


def _is_random(operator: Operator) -> bool:
    return isinstance(operator, OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


def _draws(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 (torch has no public schema)
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0) > 0.0)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator

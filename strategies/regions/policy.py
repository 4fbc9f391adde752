"""The policy of selective-op AC: which operator calls of one region call are kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from strategies.regions.kept_results import Keeping, KeptResults, Returning
from strategies.regions.operator_names import Operator, SaveList


class Within(Protocol):
    """Says which entries of a save list count in the module that runs."""

    def of(self, entries: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of `entries`, of an operator that runs now, by which its result is kept."""


def selective_contexts(
    save_list: SaveList, fired: set[str], within: Within | None = None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of recomputation for one call of one region.

    A compiler that records the region needs those of torch, which mark its graph; that has neither writes nor
    states of generators.

    Args:
        save_list: what is kept; every `save_list.recompute_every`-th counted matmul is not.
        fired: receives the entries of `save_list` that an operator of forward matches.
        within: says which entries count where forward is; `None` lets all count.
    """
    choice = _Choice(save_list, fired, within)
    if not is_traced():
        results, operators = KeptResults(), save_list.operators
        return Keeping(results, operators, choice.keeps), Returning(results, operators)
    forward, recompute = create_selective_checkpoint_contexts(choice.policy)
    if hasattr(forward, "respect_saved_tensors_hooks"):  # what torch tells it does not reach it below
        forward.respect_saved_tensors_hooks = False
    return forward, recompute


class _Choice:
    """Says of each operator of one region call whether its result is kept."""

    def __init__(self, save_list: SaveList, fired: set[str], within: Within | None) -> None:
        self._save_list, self._fired, self._within = save_list, fired, within
        self._counted = {
            False: 0,
            True: 0,
        }  # by whether recomputation asks: torch before 2.12 asks in both passes

    def keeps(self, operator: Operator, *, is_recompute: bool = False) -> bool:
        """Say whether the result of the next call of `operator` is kept."""
        save_list = self._save_list
        entries = save_list.entries_of(operator)
        if self._within is not None:
            entries = self._within.of(entries)
        if not entries:
            return False
        if not is_recompute:
            self._fired.update(entries)
        if save_list.recompute_every and operator in save_list.counted:
            self._counted[is_recompute] += 1
            return self._counted[is_recompute] % save_list.recompute_every != 0
        return True

    def policy(self, context: Any, operator: Operator, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Say the same in the words of torch."""
        is_kept = self.keeps(operator, is_recompute=context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_traced() -> bool:
    """Say if a compiler records the region; it keeps the states of random operators in the graph itself."""
    proxies = torch._C._TorchDispatchModeKey.PROXY  # noqa: SLF001 (`checkpoint` asks so too)
    return torch._C._get_dispatch_mode(proxies) is not None  # noqa: SLF001 (as above)

"""`ac=python`: what a function of the user's does to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strategies import user_sources
from strategies.base import StrategyError, check_simple_fields
from strategies.foreign import policy_files
from strategies.foreign.variant import Foreign
from strategies.regions import block_search, blocks, region
from strategies.user_function import UserFunction

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Python(Foreign):
    """Do what a function of the user's does, such as what a trainer switches on.

    Use when: one's own checkpointing, or that of a library, is to be compared with ours.

    Saved: what the function keeps.
    Recomputed: what the function runs again.
    Moved: what the function moves.

    Fields:
        factory: `package.module:function`, importable, or below the current folder.
            `function(model, **kwargs)` returns the model to use, or changes it in place. A policy of torch,
            `function(ctx, op, *args, **kwargs)`, says what stays of each operator of each block.
        kwargs: further arguments of the function, by name; null for none.
        digest: start of the SHA-256 of its module and of the user's modules that this imports, which tells
            trials of one name apart; `None`: as they are now.
        registered: name by which a package registers the function, which tables show; `None` for none.
    """

    factory: str = ""
    kwargs: dict[str, Any] | None = field(default=None, hash=False)
    digest: str | None = None
    registered: str | None = None

    def __post_init__(self) -> None:
        """Refuse what names no function, and arguments without names."""
        check_simple_fields("ac", self)
        if not self.factory:
            raise StrategyError("ac.factory", "is empty; give package.module:function, a function of a model")
        if not isinstance(self.kwargs, Mapping | None):
            raise StrategyError("ac.kwargs", f"must be a mapping or null, got {self.kwargs!r}")
        self._user().check_name()
        found = user_sources.digest_of(self.factory.partition(":")[0])
        if self.digest not in (None, found):
            problem = f"is {self.digest!r}, and {self.factory!r} has {found!r}"
            raise StrategyError("ac.digest", f"{problem}; its files have changed, or leave the digest out")
        object.__setattr__(self, "digest", found)

    @property
    def source(self) -> tuple[str, str]:
        """The option, and the name of the function."""
        return "ac.factory", repr(self.factory)

    def changed(self, model: nn.Module) -> Any:
        """Return what the function returns.

        Raises:
            StrategyError: it cannot be imported or called, or it raises.
        """
        user, arguments = self._user(), dict(self.kwargs or {})
        function = user.load()
        if not arguments and policy_files.is_policy(function):
            return self._under_policy(model, function)
        user.check_arguments(function, arguments)
        return user.call(function, model, **arguments)

    def runs_user_code(self) -> bool:
        """Return true."""
        return True

    def _under_policy(self, model: nn.Module, policy: Any) -> nn.Module:
        """Return `model`, whose blocks are checkpointed under a policy of torch.

        Raises:
            StrategyError: nothing in the model repeats.
        """
        where, name = self.source
        found = block_search.search_blocks(model)
        if found is None:
            problem = f"{name} is a policy of torch for the blocks of a model, and no module of it repeats"
            raise StrategyError(where, f"{problem}; give a function of the model")
        modules = dict(blocks.plain_named_modules(model))
        chosen = {fqn: modules[fqn] for fqn in found.classes}
        region.refuse_own_forward(chosen)
        policy_files.of_function(self.factory, policy, where).enclose(chosen)
        return model

    def _user(self) -> UserFunction:
        return UserFunction(name=self.factory, group="ac", given=1)

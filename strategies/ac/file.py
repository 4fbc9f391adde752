"""`ac=file`: what the function `apply` of a file does to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Strategy, StrategyError, check_simple_fields
from strategies.regions import region
from strategies.written import loaded_file

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class File(Strategy):
    """Do what a file with `apply(model)` says, such as one that acbench has written.

    Use when: a written file is to be measured, proven or compared as it is, or a person's own code of torch.

    Saved: what the file keeps.
    Recomputed: what the file runs again.
    Moved: what the file moves.

    Fields:
        path: the file, of Python, which defines `apply(model) -> model`; it is run.
        digest: start of the SHA-256 of the file, which tells trials of one path apart; `None`: as it is now.
    """

    is_given: ClassVar[bool] = True

    path: str = ""
    digest: str | None = None

    def __post_init__(self) -> None:
        """Refuse a missing name, a file that cannot be read, and another one than that of the digest."""
        check_simple_fields("ac", self)
        if not self.path:
            raise StrategyError(
                "ac.path", "is empty; give a file with `apply(model)`, as show=file prints one"
            )

        found = loaded_file.digest_of(loaded_file.source_of(self.path, "ac.path"))
        if self.digest not in (None, found):
            problem = f"is {self.digest!r}, and {self.path!r} has {found!r}"
            raise StrategyError("ac.digest", f"{problem}; the file has changed, or leave the digest out")
        object.__setattr__(self, "digest", found)

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (the file takes none)
        """Return what the file's `apply` makes of `model`.

        Raises:
            StrategyError: the file cannot be used or is for another model; this one is checkpointed already.
        """
        region.refuse_enclosed(model)
        function = loaded_file.apply_of(self.path, "ac.path")
        try:
            changed = function(model)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StrategyError("ac.path", f"{self.path!r}: {error}") from error
        result: nn.Module = model if changed is None else changed
        region.mark(result)
        return result

    def runs_user_code(self) -> bool:
        """Return true."""
        return True

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (wherever it is compiled)
        """Refuse compiled code: rules name what runs eagerly.

        Raises:
            StrategyError: always.
        """
        raise StrategyError("compile", "ac=file is for what runs eagerly; use compile=none")

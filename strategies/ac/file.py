"""`ac=file`: what the function `apply` of a file does to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
    """

    is_given: ClassVar[bool] = True

    path: str = ""

    def __post_init__(self) -> None:
        """Refuse a missing name."""
        check_simple_fields("ac", self)
        if not self.path:
            raise StrategyError(
                "ac.path", "is empty; give a file with `apply(model)`, as show=file prints one"
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (Path(self.path),)

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

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (wherever it is compiled)
        """Refuse compiled code: rules name what runs eagerly.

        Raises:
            StrategyError: always.
        """
        raise StrategyError("compile", "ac=file is for what runs eagerly; use compile=none")

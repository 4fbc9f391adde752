"""`ac=file`: what a file says: code that changes a model, a policy of torch, or a list of what stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.ac.base import ActivationCheckpointing
from strategies.base import StrategyError
from strategies.budget.eager import first_call
from strategies.budget.export import operator_modules
from strategies.foreign import policy_files
from strategies.regions import blocks, region
from strategies.written import loaded_file

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.region import RegionCallSite


@dataclass(frozen=True, kw_only=True, slots=True)
class File(ActivationCheckpointing):
    """Do what a file says: code such as acbench writes, or a policy or a plan that somebody else has made.

    Use when: a written file, a policy of torch, or a list of what stays (`MODULE::OPERATOR`, regions of
        torch-remat) is to be measured, proven, bounded or compared as it is.

    Saved: what the file keeps.
    Recomputed: what the file runs again.
    Moved: what the file moves.

    Fields:
        path: the file. Python, which is run, defines `apply(model) -> model`, or for all blocks
            `policy_fn(ctx, op, *args, **kwargs)`. YAML has submodules that torch-remat keeps, by block. Any
            other text has lines `MODULE::OPERATOR` of what stays of blocks.
        digest: start of the SHA-256 of the file, which tells trials of one path apart; `None`: as it is now.
    """

    needs_instructions: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ()

    path: str = ""
    digest: str | None = None

    def __post_init__(self) -> None:
        """Refuse a missing name, a file that cannot be read, and another one than that of the digest."""
        ActivationCheckpointing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if not self.path:
            problem = "is empty; give a file with `apply(model)`, as show=file prints one"
            raise StrategyError("ac.path", f"{problem}, or with a plan")
        text = loaded_file.source_of(self.path, "ac.path")
        found = loaded_file.digest_of(text)
        if self.digest not in (None, found):
            problem = f"is {self.digest!r}, and {self.path!r} has {found!r}"
            raise StrategyError("ac.digest", f"{problem}; the file has changed, or leave the digest out")
        object.__setattr__(self, "digest", found)
        if not policy_files.is_code(self.path):
            policy_files.of_text(self.path, text, "ac.path")

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        """Return what the file makes of `model`.

        Raises:
            StrategyError: the file cannot be used or is for another model; this one is checkpointed already.
        """
        region.refuse_enclosed(model)
        if policy_files.is_code(self.path):
            names = ("apply", policy_files.NAME)
            name, function = loaded_file.function_of(self.path, names, "ac.path")
            if name == "apply":
                return self._changed(model, function)
            policy = policy_files.of_function(self.path, function, "ac.path")
        else:
            text = loaded_file.source_of(self.path, "ac.path")
            policy = policy_files.of_text(self.path, text, "ac.path")
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        region.refuse_own_forward(found)
        if not blocks.is_stage(model):
            policy.check(found)
            if sample and any(each.is_meta for each in model.parameters()):  # before a rank starts
                self._check_operators(policy, model, sample)
        policy.enclose(found)
        return model

    @property
    def unsplittable(self) -> str:
        """The name of torch-remat, where that carries the file out."""
        return "torch_remat" if policy_files.is_of_regions(self.path) else ""

    def call_site(self, model: nn.Module) -> RegionCallSite:  # noqa: ARG002 (refused whatever the model)
        """Refuse: a file changes a model, or says what stays of blocks. Raises StrategyError: always."""
        raise StrategyError("wrap_order", "call_site does not suit File; use inside_fsdp")

    def runs_user_code(self) -> bool:
        """Return whether the file is Python."""
        return policy_files.is_code(self.path)

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (wherever it is compiled)
        """Refuse compiled code: rules name what runs eagerly. Raises StrategyError: always."""
        raise StrategyError("compile", "ac=file is for what runs eagerly; use compile=none")

    def _check_operators(
        self, policy: policy_files.PolicyFile, model: nn.Module, sample: tuple[Any, ...]
    ) -> None:
        """Refuse operators that blocks do not run, where a step without data says which they run."""

        def forwards() -> Mapping[str, operator_modules.BlockForward]:
            step = first_call.shadow_step(model, sample, {})
            found = blocks.find_blocks(
                step.model, layers_fqn=self.layers_fqn, module_classes=self.module_classes
            )
            try:
                return operator_modules.block_forwards(step, found)
            except StrategyError:  # ranks have the data that forward asks for
                return {}

        policy.check_operators(forwards)

    def _changed(self, model: nn.Module, function: Any) -> nn.Module:
        try:
            changed = function(model)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StrategyError("ac.path", f"{self.path!r}: {error}") from error
        result: nn.Module = model if changed is None else changed
        region.mark(result)
        return result

"""`ac=torch_remat`: recompute whole blocks but for named submodules, with the package `torch-remat`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.ac.base import ActivationCheckpointing, RegionMaker
from strategies.base import Observation, StrategyError, take_names
from strategies.regions import blocks, region, selectors

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.region import RegionCallSite


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRemat(ActivationCheckpointing):
    """Checkpoint every block with torch-remat; submodules that `save_regions` names are not recomputed.

    Use when: parts of a block that are dear to recompute can be named as modules; needs the extra `remat`.

    Saved: the inputs of each block; of `save_regions` what autograd saves, and their outputs.
    Recomputed: the forward of all other modules of all L blocks, once a step and to its end.
    Moved: nothing.

    torch-remat manages no random numbers; where `preserve_rng_state` asks for it, hooks of ours do.

    Fields:
        save_regions: FQNs inside a block, `[attention]`; the outermost of modules inside one another counts.
        preserve_rng_state: recompute with the random numbers of forward; without it, dropout makes
            gradients wrong and nothing says so.

    Source: https://pypi.org/project/torch-remat, version 0.2.2.
    """

    package: ClassVar[str] = "torch_remat"
    views: ClassVar[tuple[str, ...]] = ()

    save_regions: tuple[str, ...] = ()
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        """Refuse names that are no list, and a missing package."""
        ActivationCheckpointing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        take_names(self, "ac.save_regions", "module names in a block")
        if find_spec(self.package) is None:
            problem = "torch_remat needs the package torch-remat, which is not installed"
            raise StrategyError("ac", f"{problem}: pip install 'acbench[remat]'")

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        """Return `model`, with a region around each block, and one around each submodule that is kept.

        Raises:
            StrategyError: as of every variant, or a block has no such submodule.
        """
        enclosed = ActivationCheckpointing.apply(self, model, sample)
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        for block in found.values():
            outer = region.regions(block)[""]
            _remat().keep(block, self._kept(block), outer)
        return enclosed

    @property
    def unsplittable(self) -> str:
        """The name of the variant."""
        return "torch_remat"

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (blocks and models alike)
        """Refuse modules to keep inside compiled code that a region holds: torch-remat does not meet them.

        Raises:
            StrategyError: naming the order.
        """
        if self.save_regions and order == "compile_first":
            problem = "compile_first hides what ac.save_regions names from torch-remat"
            raise StrategyError("compile_order", f"{problem}; use compile_order=ac_first")

    def call_site(self, model: nn.Module) -> RegionCallSite:
        """Return a callable that runs `model` as one region.

        Raises:
            StrategyError: the model is checkpointed already, or blocks are to keep submodules.
        """
        if self.save_regions:
            problem = "call_site makes the model one region, and ac.save_regions names parts of blocks"
            raise StrategyError("wrap_order", f"{problem}; use inside_fsdp")
        return ActivationCheckpointing.call_site(self, model)

    def observe(self, model: nn.Module) -> Observation:
        """Return the submodules that are kept, and those that no forward has called."""
        found = [each.observe() for each in region.regions(model).values()]
        missed = {name for each in found for name in each.never_fired}
        return Observation(
            named=self.save_regions, never_fired=tuple(name for name in self.save_regions if name in missed)
        )

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:  # noqa: ARG002 (blocks say all)
        """Refuse a block that lacks a module to save, and saved modules whose forward nobody would call."""
        for fqn, block in chosen.items():
            kept = self._kept(block)
            missing = next((name for name in self.save_regions if name not in kept), None)
            if missing is not None:
                near = selectors.nearest(missing, selectors.inside(block))
                problem = f"{fqn!r} has no submodule {missing!r}; {near}"
                raise StrategyError("ac.save_regions", problem)
            region.refuse_own_forward({f"{fqn}.{name}": module for name, module in kept.items()})

    def _kept(self, block: nn.Module) -> dict[str, nn.Module]:
        modules = dict(blocks.plain_named_modules(block))
        return {name: modules[name] for name in self.save_regions if name in modules}

    def _region_maker(self) -> RegionMaker:
        remat = _remat()
        return lambda fqn: remat.Remat(preserve_rng_state=self.preserve_rng_state, fqn=fqn)


def _remat() -> ModuleType:
    """Return the module that imports `torch_remat`, an optional package."""
    return import_module("strategies.regions.remat")

"""Parts that the AC variants share: the choice of blocks, and the report of their regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from strategies import generators
from strategies.base import (
    Observation,
    RunnableStep,
    Strategy,
    StrategyError,
    check_simple_fields,
    take_names,
)
from strategies.budget.eager import first_call, named_fates
from strategies.regions import blocks, offloading, recomputation, region, rewind
from strategies.regions.split_backward_modes import require_split_backward
from strategies.written import file_text

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.fates import Rules
    from strategies.regions.operator_names import SaveList
    from strategies.regions.policy import Within
    from strategies.regions.region import Region, RegionCallSite

_WRITTEN = {
    "preserve_rng_state": True,
    "early_stop": True,
    "use_reentrant": False,
    "offload": False,
    "rewind": False,
}
"""What written files do, by option."""

RegionMaker: TypeAlias = "Callable[[str], Region]"
"""Makes the region of one module of a model, by its FQN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing(Strategy):
    """A variant that puts one region around each chosen block, in place.

    Fields:
        layers_fqn: FQN of the container (ModuleList, ModuleDict, Sequential) whose children are the blocks.
        module_classes: class names of the blocks, wherever they are; wins over `layers_fqn`. Of matches that
            nest, the outermost is the block: a norm inside of attention belongs to the attention.
    """

    views: ClassVar[tuple[str, ...]] = ("file",)

    layers_fqn: str = ""
    module_classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse names of classes that are no list, and values of other types than declared."""
        check_simple_fields("ac", self)
        take_names(self, "ac.module_classes", "class names")

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (no tracing here)
        """Return `model`, with a region around each chosen block.

        Raises:
            StrategyError: no such blocks, the model is checkpointed already, or a block has its own
                `forward` on the instance.
        """
        region.refuse_enclosed(model)
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        chosen = {fqn: found[fqn] for fqn in self._chosen(list(found))}
        region.refuse_own_forward(chosen)
        self._check_blocks(model, chosen)
        make = self._region_maker()
        for fqn, block in chosen.items():
            region.enclose(block, make(fqn))
        return model

    def view(
        self,
        name: str,  # noqa: ARG002 (it is `file`)
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a file that does the same with torch alone.

        Args:
            name: `file`.
            model: a plain model, to which the strategy is applied; on the meta device is enough.
            sample: example positional inputs.
            keywords: inputs that the model takes by name alone.

        Raises:
            StrategyError: no such blocks, or an option that such a file has no words for.
        """
        found = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        chosen = self._chosen(list(found))
        variant = type(self).__module__.rpartition(".")[2]
        of_which = f"{len(chosen)} of {len(found)} blocks of {blocks.plain_class(model).__name__}"
        header = {"title": f"ac={variant} of acbench for {of_which}.", "name": f"apply_{variant}"}
        return self._file(
            header, chosen, partial(first_call.shadow_step, model, sample, dict(keywords or {}))
        )

    def call_site(self, model: nn.Module) -> RegionCallSite:
        """Return a callable that runs `model` as one region, like `checkpoint(model, ...)` in a loop.

        Raises:
            StrategyError: the model is checkpointed already. A variant that chooses among blocks overrides
                this and refuses always: one region leaves it no choice.
        """
        region.refuse_enclosed(model)
        return region.RegionCallSite(model, self._region_maker()(""))

    def observe(self, model: nn.Module) -> Observation:
        """Return what the regions of `model` showed: bytes of the latest step, operators of all steps."""
        return _merged([each.observe() for each in region.regions(model).values()])

    def _chosen(self, fqns: Sequence[str]) -> Sequence[str]:
        """Return the FQNs of those of all blocks, in order, that get a region; here all of them."""
        return fqns

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:
        """Refuse blocks that the variant cannot stand around."""

    def _file(
        self, header: Mapping[str, str], chosen: Sequence[str], step: Callable[[], RunnableStep]
    ) -> str:
        """Return the file that does it to `chosen` blocks, with title and name as in `header`.

        Args:
            header: title and name.
            chosen: FQNs of the blocks.
            step: makes a step of the plain model without memory.
        """
        raise NotImplementedError

    def _region_maker(self) -> RegionMaker:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputing(ActivationCheckpointing):
    """A variant that recomputes activations of its regions in backward.

    Fields:
        preserve_rng_state: recompute with the random numbers of forward; without it, dropout makes
            gradients wrong and nothing says so.
        early_stop: end a recomputation at the last tensor that backward needs; ignored with `use_reentrant`.
        use_reentrant: use the older implementation of torch, which runs forward without autograd.
        offload: keep the saved inputs of regions in host memory.
        rewind: recompute with the state that forward found: buffers and attributes of the block's modules,
            Python's and NumPy's random numbers, context variables; afterwards all is as it was before.
        split_backward: where a pipeline's schedule runs the backward of inputs and that of parameters apart:
            `hold` what the second needs of the one recomputation, recompute once `again` for it, or leave it
            to `torch`, which recomputes once for each group of parameters. A backward of one piece is the
            same with each; ignored with `use_reentrant` and in compiled code.
    """

    preserve_rng_state: bool = True
    early_stop: bool = True
    use_reentrant: bool = False
    offload: bool = False
    rewind: bool = False
    split_backward: str = "hold"

    def __post_init__(self) -> None:
        """Refuse another `split_backward` than there are."""
        ActivationCheckpointing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        require_split_backward(self.split_backward)

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (blocks and models alike)
        """Refuse regions that no compiler records: it gave up the whole block, and compiled nothing.

        Raises:
            StrategyError: `use_reentrant` or `rewind` inside compiled code.
        """
        for option in ("use_reentrant", "rewind") if order == "ac_first" else ():
            if getattr(self, option):
                raise StrategyError(
                    f"ac.{option}",
                    f"true inside compiled code keeps all of it from being compiled; use ac.{option}=false "
                    "or compile_order=compile_first",
                )

    def _check_blocks(self, model: nn.Module, chosen: dict[str, nn.Module]) -> None:
        """Refuse reentrant recomputation of blocks inside sharded FSDP1 units."""
        for fqn, block in chosen.items() if self.use_reentrant else ():
            unit = blocks.sharded_fsdp1_unit(model, fqn, block)
            if unit is not None:
                # measured: setStorage raises where the unit's weights are freed before the inner backward
                raise StrategyError(
                    "ac.use_reentrant",
                    f"{fqn!r} lies inside the sharded FSDP1 unit {unit!r}, whose weights are freed before "
                    "recomputation; use ac.use_reentrant=false or wrap_order=outside_fsdp",
                )

    def _file(
        self,
        header: Mapping[str, str],
        chosen: Sequence[str],
        step: Callable[[], RunnableStep],  # noqa: ARG002 (nothing runs)
    ) -> str:
        """Return the file that runs whole blocks again."""
        self._refuse_without_words()
        return file_text.recomputing_file(chosen, **header)

    def _refuse_without_words(self) -> None:
        for option, usual in _WRITTEN.items():
            value = getattr(self, option)
            if value != usual:
                problem = f"is {str(value).lower()}, which a written file has no words for"
                raise StrategyError(f"ac.{option}", f"{problem}; use ac.{option}={str(usual).lower()}")

    def _region_maker(self) -> RegionMaker:
        """Return what makes the region of one block.

        All regions share one save list, ledger and generators.
        """
        save_list, ledger = self._save_list(), offloading.HostLedger()
        latest_states = generators.LatestStates()

        def make(fqn: str) -> Region:
            """Return a region: recomputation, inside of offloading where that is asked for."""
            inner = recomputation.Recomputation(
                preserve_rng_state=self.preserve_rng_state,
                early_stop=self.early_stop,
                use_reentrant=self.use_reentrant,
                save_list=save_list,
                within=self._within(),
                split_backward=self.split_backward,
                rewind=rewind.Rewind(generators=latest_states) if self.rewind else None,
                fqn=fqn,
            )
            if not self.offload:
                return inner
            return region.Around(outer=offloading.Offloading(ledger=ledger), inner=inner)

        return make

    def _save_list(self) -> SaveList | None:
        return None

    def _within(self) -> Within | None:
        """Return what says when one region keeps the results of its save list; `None` for always."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ByName(ActivationCheckpointing):
    """A variant in which names of modules inside blocks decide what becomes of what they make."""

    needs_instructions: ClassVar[bool] = True
    acts_on_each_block_alone: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ()

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (no tracing here)
        """Return `model`, with a region around each chosen block, and around each module that is named.

        Raises:
            StrategyError: no such blocks or modules, the model is checkpointed already, or a region would
                stand around a `forward` that is set on an instance.
        """
        region.refuse_enclosed(model)
        every = blocks.find_blocks(model, layers_fqn=self.layers_fqn, module_classes=self.module_classes)
        found = {fqn: every[fqn] for fqn in self._chosen(list(every))}
        if not blocks.is_stage(model):  # a name may be of blocks that another stage has
            self._check_blocks(model, found)
        rules = {fqn: self._rules(block) for fqn, block in found.items()}
        for fqn, block in found.items():
            modules = dict(blocks.plain_named_modules(block))
            region.refuse_own_forward({f"{fqn}.{name}": modules[name] for name in rules[fqn] if name})
            region.refuse_own_forward({fqn: block})
        named_fates.enclose(found, rules, matched=self._named_modules(), named=self._named_operators())
        return model

    def check_compilation(self, order: str, scope: str) -> None:  # noqa: ARG002 (blocks and models alike)
        """Refuse compiled code, of which no tape has the operators. Raises StrategyError: always."""
        name = type(self).__module__.rpartition(".")[2]
        problem = f"ac={name} follows the operators of eager blocks"
        raise StrategyError("compile", f"{problem}; use compile=none, or ac=selective_op")

    def call_site(self, model: nn.Module) -> RegionCallSite:  # noqa: ARG002 (refused whatever the model)
        """Refuse: names are those of modules inside blocks. Raises StrategyError: always."""
        name = type(self).__module__.rpartition(".")[2]
        problem = f"call_site makes the model one region, and ac={name} names modules inside blocks"
        raise StrategyError("wrap_order", f"{problem}; use inside_fsdp")

    def _rules(self, block: nn.Module) -> Mapping[str, Rules]:
        """Return the rules inside a block, as `named_fates.enclose` takes them."""
        raise NotImplementedError

    def _named_modules(self) -> Sequence[str]:
        return ()

    def _named_operators(self) -> Sequence[str]:
        return ()


def _merged(observations: Sequence[Observation]) -> Observation:
    """Return what the regions of one model did together."""
    if not observations:
        return Observation()
    named = observations[0].named
    return Observation(
        named=named,
        never_fired=tuple(name for name in named if all(name in o.never_fired for o in observations)),
        # regions of one model share one ledger, so each of them tells the sum
        offloaded_bytes=max(observation.offloaded_bytes for observation in observations),
    )

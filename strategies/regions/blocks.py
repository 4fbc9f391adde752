"""Blocks of a model: found by the FQN of their container, or by class name, through every wrapper.

FSDP1, DDP and `torch.compile` put a module around the user's; FSDP2 and our own regions put a
dynamic class before the user's. Names given and names shown are those of the plain model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from strategies.base import StrategyError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WRAPPED_NAMES = frozenset({"_fsdp_wrapped_module", "_orig_mod"})
_MOST_CLASSES = 4
"""Classes that a message proposes."""


class Disguised:
    """Mark of the dynamic classes that strategies put before a user's; see also `FSDPModule`."""

    def __init_subclass__(cls) -> None:
        """Tell nobody: a user's class that keeps a list of its subclasses has no more of them."""


class Enclosed(Disguised):
    """Mark of the dynamic classes that put a region around a module; see `strategies.regions.region`."""


class Chunked(Disguised):
    """Mark of the dynamic classes that run a forward in chunks; see `chunk.running.chunked_forward`."""


class AbsentBlock(nn.Module):
    """Stands in a container for a block that a stage of a pipeline does not have: it is no block."""


def is_stage(model: nn.Module) -> bool:
    """Say whether a model is a part of one, whose other blocks are on other stages of a pipeline."""
    return any(isinstance(each, AbsentBlock) for each in model.modules())


def find_blocks(
    model: nn.Module, *, layers_fqn: str, module_classes: tuple[str, ...]
) -> dict[str, nn.Module]:
    """Return `{plain FQN: block}` in the order of the model; `module_classes` wins over `layers_fqn`.

    By `layers_fqn` a block is a child of the container as it stands, so that under FSDP1 it is the
    FSDP unit. By `module_classes` it is the innermost module, inside its unit; of matches
    that nest, the outermost.

    Raises:
        StrategyError: nothing is named, a name is missing, no container, empty, or all modules of a named
            class lie inside of others that are named.
    """
    if module_classes:
        return _by_class(model, module_classes)
    try:
        return children_of(model, layers_fqn)
    except StrategyError as error:
        way_out = by_class(classes_outside(model))
        raise StrategyError(error.where, error.problem + (way_out and f"; or {way_out}")) from None


def classes_outside(model: nn.Module) -> list[str]:
    """Return the classes of modules with parts that no container of blocks holds, and that hold none.

    One that forward calls several times is a block, and nothing in the tree of modules says so.
    """
    modules = dict(plain_named_modules(model))
    boxes = [
        name
        for name, box in modules.items()
        if name and isinstance(box, CONTAINERS) and any(any(child.children()) for child in box.children())
    ]
    found = (
        plain_class(module).__name__
        for name, module in modules.items()
        if name
        and not isinstance(module, CONTAINERS)
        and any(module.children())
        and any(True for _ in module.parameters())
        and not any(f"{name}.".startswith(f"{box}.") or f"{box}.".startswith(f"{name}.") for box in boxes)
    )
    has_stages = not boxes and any(isinstance(child, nn.Sequential) for child in model.children())
    return list(dict.fromkeys(found)) or ["Sequential"] * has_stages


def by_class(classes: Sequence[str]) -> str:
    """Return how blocks are named by class, on the command line and in a program; nothing without one."""
    if not classes:
        return ""
    named = " or ".join(f"ac.module_classes=[{name}]" for name in classes[:_MOST_CLASSES])
    return f"name blocks by their class, {named} (in a program module_classes=[{classes[0]!r}])"


def children_of(model: nn.Module, layers_fqn: str) -> dict[str, nn.Module]:
    """Return `{plain FQN: child}` of the container `layers_fqn`, a module used twice once.

    Raises:
        StrategyError: the FQN is empty, missing, no container, or a container of nothing.
    """
    children = container_at(model, layers_fqn).named_children()
    return {f"{layers_fqn}.{name}": block for name, block in children if not isinstance(block, AbsentBlock)}


def names_of_children(model: nn.Module, layers_fqn: str) -> list[str]:
    """Return the plain FQNs of the children of `layers_fqn`, a module used twice under both.

    Raises:
        StrategyError: as of `children_of`.
    """
    children = container_at(model, layers_fqn)._modules  # noqa: SLF001 (named_children leaves repetitions out)
    return [f"{layers_fqn}.{name}" for name, each in children.items() if not isinstance(each, AbsentBlock)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelModules:
    """The modules of a model that a plan may decide about, by plain FQN, below its wrappers.

    Fields:
        beside: what stands next to all of them and has parameters and no children: the last norm, the head.
        caller: the module whose forward calls the blocks; `None` where no region can stand around it.
    """

    blocks: Mapping[str, nn.Module]
    beside: Mapping[str, nn.Module] = field(default_factory=dict)
    caller: tuple[str, nn.Module] | None = None

    @classmethod
    def of(cls, model: nn.Module, blocks: Mapping[str, nn.Module]) -> ModelModules:
        """Return those of `model`; modules with a `forward` set on the instance can have no region.

        Args:
            blocks: its blocks by plain FQN.
        """
        named = dict(plain_named_modules(model))  # of equal names the last: what is below wrappers
        caller = _caller_of(model, blocks)
        calls = unwrapped(submodule(model, caller))
        beside = {
            name: module
            for name, module in named.items()
            if _is_beside(name, blocks) and module._parameters and not module._modules  # noqa: SLF001 (its own)
        }
        return cls(
            blocks={fqn: unwrapped(block) for fqn, block in blocks.items()},
            beside={name: each for name, each in beside.items() if "forward" not in vars(each)},
            caller=None if "forward" in vars(calls) else (caller, calls),
        )

    def all(self) -> dict[str, nn.Module]:
        """Return blocks and what stands next to them."""
        return {**self.beside, **self.blocks}


def _caller_of(model: nn.Module, blocks: Iterable[str]) -> str:
    """Return the FQN of the module that calls the blocks: the innermost around all that is no container."""
    parents = [fqn.split(".")[:-1] for fqn in blocks]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    common = [names[0] for names in levels]
    while common and isinstance(unwrapped(submodule(model, ".".join(common))), CONTAINERS):
        common.pop()
    return ".".join(common)


def _is_beside(name: str, blocks: Iterable[str]) -> bool:
    """Say whether the parent of a module holds all blocks, of which the module is none."""
    parent = name.rpartition(".")[0]
    begins = f"{parent}." if parent else ""
    return bool(name) and all(fqn != name and fqn.startswith(begins) for fqn in blocks)


def container_at(model: nn.Module, layers_fqn: str) -> nn.Module:
    """Return the container of blocks `layers_fqn`, below its wrappers.

    Raises:
        StrategyError: the FQN is empty, missing, no container, or a container of nothing.
    """
    if not layers_fqn:
        raise _not_blocks(model, "is empty; name the module that holds the blocks, ")
    container = unwrapped(model)
    for part in layers_fqn.split("."):
        child = dict(container.named_children()).get(part)
        if child is None:
            raise _not_blocks(model, f"{layers_fqn!r} is not a module of {_root_name(model)}; ")
        container = unwrapped(child)
    if not isinstance(container, CONTAINERS):
        problem = f"{layers_fqn!r} is a {plain_class(container).__name__}"
        raise _not_blocks(model, f"{problem}, not a ModuleList, ModuleDict or Sequential; ")
    if all(isinstance(child, AbsentBlock) for child in container.children()):
        raise _not_blocks(model, f"{layers_fqn!r} holds no blocks; ")
    return container


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class the user wrote, below the dynamic classes of FSDP2 and of strategies."""
    dynamic = (FSDPModule, Disguised)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, dynamic))


def plain_named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `(plain FQN, module)` for every module, wrappers before what they wrap."""
    inside_ddp = isinstance(model, DistributedDataParallel)
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if part not in _WRAPPED_NAMES]
        if inside_ddp and parts[0] == "module":
            parts = parts[1:]
        yield ".".join(parts), module


def sharded_fsdp1_unit(model: nn.Module, fqn: str, block: nn.Module) -> str | None:
    """Return the FQN of the FSDP1 unit that shards `block` from outside; `None` where none does.

    Args:
        fqn: plain FQN of `block`.
        block: a module of `model`; a block that is itself a unit is sharded by nobody else.
    """
    unit = None
    for name, module in plain_named_modules(model):
        if module is block:
            break
        if isinstance(module, FullyShardedDataParallel) and f"{fqn}.".startswith(f"{name}." if name else ""):
            unit = (name or _root_name(model), module)
    if unit is None or isinstance(block, FullyShardedDataParallel):
        return None
    return unit[0] if unit[1].sharding_strategy is not ShardingStrategy.NO_SHARD else None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside FSDP1, DDP and `torch.compile` wrappers."""
    while True:
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # noqa: SLF001 (children without the forwarding of OptimizedModule)
            module = module.get_submodule("_orig_mod")
        else:
            return module


def submodule(module: nn.Module, fqn: str) -> nn.Module:
    """Return the submodule to call, wrapped as it is; `""` is `module` itself."""
    found = module
    for name in fqn.split(".") if fqn else ():
        plain = unwrapped(found)
        child = vars(plain)["_modules"].get(name)  # nn.Module looks there last
        found = getattr(plain, name) if child is None else child
    return found


def _root_name(model: nn.Module) -> str:
    return plain_class(unwrapped(model)).__name__


def _not_blocks(model: nn.Module, problem: str) -> StrategyError:
    """Return the error of an FQN that is no container of blocks, with those that are containers."""
    names = [name for name, module in plain_named_modules(model) if name and isinstance(module, CONTAINERS)]
    containers = ", ".join(dict.fromkeys(names)) or "none"
    return StrategyError("ac.layers_fqn", f"{problem}containers are: {containers}")


def _by_class(model: nn.Module, module_classes: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the outermost modules of these classes by FQN; refuse classes that add none."""
    class_names = {name: plain_class(module).__name__ for name, module in plain_named_modules(model) if name}
    for wanted in module_classes:
        if wanted not in class_names.values():
            raise StrategyError("ac.module_classes", _no_such_class(model, wanted, set(class_names.values())))
    blocks = {
        name: module
        for name, module in plain_named_modules(model)
        if name and plain_class(module).__name__ in module_classes
    }
    around = {
        name: outer
        for name in blocks
        if (outer := next((other for other in blocks if name.startswith(f"{other}.")), None)) is not None
    }
    outermost = {name: block for name, block in blocks.items() if name not in around}
    standing = {class_names[name] for name in outermost}
    for name, outer in around.items():
        if class_names[name] not in standing:
            problem = f"{name!r} ({class_names[name]}) lies inside {outer!r} ({class_names[outer]})"
            raise StrategyError("ac.module_classes", f"{problem}; name one of them")
    return outermost


def _no_such_class(model: nn.Module, wanted: str, names: set[str]) -> str:
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    classes = ", ".join(sorted(names))
    return f"{wanted!r} is no class of a module in {_root_name(model)}; {hint}classes are: {classes}"

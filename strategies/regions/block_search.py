"""The search for the blocks of a model: from the tree of modules, without running anything.

A block is a child of an outermost container, and has children and parameters itself. A container of stages,
which are not alike, is entered: its stages hold the blocks. So is a list or dictionary in a container, which
nobody calls. Modules of the same class elsewhere, such as the
middle of a U-shaped network, are blocks too. Without such a container the blocks are the outermost class of
which there are several, or else the children of a list or dictionary, whatever they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from strategies.regions.blocks import CONTAINERS, plain_class, plain_named_modules

_LEAST_SHARE = 0.02
"""Of the parameters of all blocks, those in a container that is no more than a stem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBlocks:
    """The blocks of a model, and the options that name them.

    Fields:
        classes: class name of each block by its FQN, in the order of the model.
        layers_fqn: the container with most of them; empty where no container holds them.
        module_classes: the classes of all blocks where they are no children of one container; else empty.
    """

    classes: Mapping[str, str]
    layers_fqn: str
    module_classes: tuple[str, ...]

    @property
    def words(self) -> str:
        """Return how many there are of each class, `12 GPTBlock`."""
        return counted(self.classes)


def counted(classes: Mapping[str, str]) -> str:
    """Return how many modules there are of each class, `6 EncoderLayer and 6 DecoderLayer`."""
    return " and ".join(f"{count} {name}" for name, count in Counter(classes.values()).items())


def search_blocks(model: nn.Module) -> FoundBlocks | None:
    """Return the blocks of a plain model on any device; `None` where it has nothing that repeats.

    Two containers are one set of blocks by their classes. A container with less than 2 % of the parameters
    of all blocks is left out.
    """
    modules = dict(plain_named_modules(model))
    chosen = _entered(modules, _without_small(modules, _outermost(modules, "")))
    chosen = _called(modules, chosen, _may_be_block) or _repeated_class(modules) or _listed(modules)
    if not chosen:
        return None
    classes = {fqn: plain_class(modules[fqn]).__name__ for fqn in chosen}
    box = _largest_box(modules, chosen)
    inside = {fqn: name for fqn, name in classes.items() if box and _box_of(fqn) == box}
    everywhere = _everywhere(modules, set(classes.values()))
    if everywhere is None or everywhere == inside:
        # where classes nest they name no blocks, and one container has to do
        return FoundBlocks(classes=inside, layers_fqn=box, module_classes=()) if box else None
    return FoundBlocks(
        classes=everywhere, layers_fqn=box, module_classes=tuple(dict.fromkeys(everywhere.values()))
    )


def same_class_elsewhere(model: nn.Module, chosen: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the class of each module outside of the chosen ones and of a class of theirs, by FQN."""
    classes = {plain_class(module).__name__ for module in chosen.values()} - _CONTAINER_NAMES
    return {
        fqn: plain_class(module).__name__
        for fqn, module in plain_named_modules(model)
        if fqn
        and plain_class(module).__name__ in classes
        and not any(is_under(fqn, block) or is_under(block, fqn) for block in chosen)
    }


def question(model: nn.Module, chosen: Mapping[str, nn.Module]) -> str | None:
    """Return of how many modules of a class regions stand around some, and the remedy; `None` where of all.

    Args:
        chosen: modules with regions, by FQN.
    """
    elsewhere = same_class_elsewhere(model, chosen)
    beside = sum(_size(model.get_submodule(fqn)) for fqn in elsewhere)
    inside = sum(map(_size, chosen.values()))
    if beside <= _LEAST_SHARE * (inside + beside):
        return None
    name, left = Counter(elsewhere.values()).most_common(1)[0]
    count = sum(plain_class(module).__name__ == name for module in chosen.values())
    return f"{count} of {count + left} {name}; try ac.module_classes=[{name}]"


def is_under(fqn: str, outer: str) -> bool:
    """Return whether a module is `outer` or lies in it."""
    return not outer or f"{fqn}.".startswith(f"{outer}.")


_CONTAINER_NAMES = {kind.__name__ for kind in CONTAINERS}


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _may_be_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _blocks_in(modules: Mapping[str, nn.Module], box: str) -> list[str]:
    """Return the FQNs of the children of a container that may be blocks."""
    return [fqn for fqn in _children(modules, box) if _may_be_block(modules[fqn])]


def _children(modules: Mapping[str, nn.Module], box: str) -> list[str]:
    """Return the FQNs of the children of a container, but for those that another one holds before it."""
    names = (f"{box}.{name}" for name, _ in modules[box].named_children())
    return [fqn for fqn in names if fqn in modules]


def _called(
    modules: Mapping[str, nn.Module], chosen: list[str], is_chosen: Callable[[nn.Module], bool]
) -> list[str]:
    """Return the chosen modules, with what lists and dictionaries among them hold in place of these.

    Next to other classes, a `Sequential` in such a list is no block: its class names none.
    """
    if not any(isinstance(modules[fqn], _LISTS) for fqn in chosen):
        return chosen
    inside = (
        [each for each in _children(modules, fqn) if is_chosen(modules[each])]
        if isinstance(modules[fqn], _LISTS)
        else [fqn]
        for fqn in chosen
    )
    found = _called(modules, [each for part in inside for each in part], is_chosen)
    return [fqn for fqn in found if not isinstance(modules[fqn], CONTAINERS)] or found


def _outermost(modules: Mapping[str, nn.Module], inside: str) -> list[str]:
    """Return the containers of blocks below `inside` that lie in no other such container."""
    boxes: list[str] = []
    for fqn, module in modules.items():
        is_inside = fqn not in ("", inside) and is_under(fqn, inside)
        if not is_inside or not isinstance(module, CONTAINERS) or any(is_under(fqn, box) for box in boxes):
            continue
        if _blocks_in(modules, fqn):
            boxes.append(fqn)
    return boxes


def _without_small(modules: Mapping[str, nn.Module], boxes: list[str]) -> list[str]:
    sizes = {box: _size(modules[box]) for box in boxes}
    return [box for box, size in sizes.items() if size >= _LEAST_SHARE * sum(sizes.values())]


def _entered(modules: Mapping[str, nn.Module], boxes: list[str]) -> list[str]:
    """Return the blocks in these containers; one whose children are stages is entered."""
    found: list[str] = []
    for box in boxes:
        children = _blocks_in(modules, box)
        alike = Counter(_shapes(modules[child]) for child in children)
        if 2 * sum(count for count in alike.values() if count > 1) > len(children):
            found += children
            continue
        stages = {child: _box_of_stage(modules, child) for child in children}
        inside = {child: _blocks_in(modules, inner) for child, inner in stages.items() if inner}
        repeated = {plain_class(modules[each[0]]) for each in inside.values() if len(each) > 1}
        for child in children:
            blocks = inside.get(child, [])
            if len(blocks) > 1:
                found += _entered(modules, [stages[child]])
            else:  # one block is a stage where other stages repeat its class
                is_stage = any(plain_class(modules[each]) in repeated for each in blocks)
                found += blocks if is_stage else [child]
    return found


def _box_of_stage(modules: Mapping[str, nn.Module], child: str) -> str:
    """Return the only container of blocks in a module, where all are of one class; else nothing."""
    boxes = [child] if isinstance(modules[child], CONTAINERS) else _outermost(modules, child)
    found = {box: blocks for box in boxes if (blocks := _blocks_in(modules, box))}
    kinds = {plain_class(modules[each]) for blocks in found.values() for each in blocks}
    return next(iter(found)) if len(found) == len(kinds) == 1 else ""


def _repeated_class(modules: Mapping[str, nn.Module]) -> list[str]:
    by_class: dict[str, list[str]] = {}
    for fqn, module in modules.items():
        if fqn and _may_be_block(module) and not isinstance(module, CONTAINERS):
            by_class.setdefault(plain_class(module).__name__, []).append(fqn)
    several = (fqns for fqns in by_class.values() if len(fqns) > 1)
    return next((fqns for fqns in several if not _is_nested(fqns)), [])


def _listed(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return what a list or dictionary holds, several modules with parameters, where none has children."""
    for fqn, module in modules.items():
        if fqn and isinstance(module, _LISTS):
            children = _called(modules, _children(modules, fqn), _has_parameters)
            if sum(_has_parameters(modules[child]) for child in children) > 1:
                return children
    return []


def _everywhere(modules: Mapping[str, nn.Module], classes: set[str]) -> dict[str, str] | None:
    """Return all modules of some classes; `None` where one lies in another, or a class is of containers."""
    if classes & _CONTAINER_NAMES:
        return None
    found = {
        fqn: plain_class(module).__name__
        for fqn, module in modules.items()
        if fqn and plain_class(module).__name__ in classes
    }
    return None if _is_nested(list(found)) else found


def _is_nested(fqns: list[str]) -> bool:
    """Return whether one of some FQNs, in the order of a model, lies in the one before it."""
    return any(is_under(inner, outer) for outer, inner in pairwise(fqns))


def _largest_box(modules: Mapping[str, nn.Module], chosen: list[str]) -> str:
    """Return the container that holds most parameters of the chosen modules; empty where none holds any."""
    sizes: Counter[str] = Counter()
    for fqn in chosen:
        box = _box_of(fqn)
        if box and isinstance(modules[box], CONTAINERS):
            sizes[box] += _size(modules[fqn])
    return max(sizes, key=lambda box: sizes[box], default="")


def _box_of(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shapes(module: nn.Module) -> tuple[object, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())

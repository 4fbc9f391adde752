"""The blocks of a model that a written file is for."""

from collections.abc import Iterable

from torch import nn

NAME = "apply_ac"


def found(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the blocks by name, one with several names once."""
    modules, wanted = dict(model.named_modules(remove_duplicate=False)), list(names)
    missing = [name for name in wanted if name not in modules]
    if missing:
        problem = f"{len(missing)} of {len(wanted)} blocks are missing, {missing[0]!r} is the first"
        raise ValueError(f"{NAME} was written for another model than this {type(model).__name__}: {problem}")
    taken = [name for name in wanted if "forward" in vars(modules[name])]
    if taken:
        raise ValueError(f"{NAME}: {taken[0]!r} has a forward of its own already; apply one file, and once")
    return {name: block for block, name in {modules[name]: name for name in reversed(wanted)}.items()}

"""The containers that can hold a model's blocks."""

from __future__ import annotations

from torch import nn

from harness.errors import ConfigError
from strategies.regions.blocks import by_class, classes_outside


def require_container(model: nn.Module, layers_fqn: str, where: str = "model.layers_fqn") -> None:
    """Refuse a `layers_fqn` that names no container of blocks; an empty one names none on purpose.

    Raises:
        ConfigError: the FQN is missing or another kind of module; the message lists the containers there are.
    """
    if not layers_fqn:
        return
    containers = [fqn for fqn, module in model.named_modules() if fqn and is_container(module)]
    if layers_fqn not in containers:
        way_out = by_class(classes_outside(model)) or "this model has none"
        options = f"containers here: {', '.join(containers)}" if containers else way_out
        problem = f"must name a ModuleList, ModuleDict or Sequential of {type(model).__name__}"
        raise ConfigError(where, f"{problem}, got {layers_fqn!r}; {options}")


def is_container(module: nn.Module) -> bool:
    """Return whether a module can hold blocks, and holds modules."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(module) > 0

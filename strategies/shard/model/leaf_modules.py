"""Leaf modules: those with exactly the forward of torch's class, which sharding candidates describe.

A subclass that changes the forward, a parametrisation, or a hook, does something that no candidate describes.
Such a module is looked into, or takes wholes, like any other code.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from strategies.tracing.module_state import has_hooks

KNOWN: Mapping[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset({"weight", "bias"}),
    nn.Embedding: frozenset({"weight"}),
    nn.LayerNorm: frozenset({"weight", "bias"}),
    nn.RMSNorm: frozenset({"weight"}),
}
"""Classes whose forward candidates describe, with the names of their parameters."""

_ACCESS = ("__call__", "__getattr__", "__setattr__", "__getattribute__")


def why_not_placed(module: nn.Module) -> str | None:
    """Return a phrase for why `module` can be no leaf module; `None` where it can."""
    known = next((cls for cls in KNOWN if isinstance(module, cls)), None)
    if known is None:
        return "is not a torch linear, embedding or norm"
    cls = type(module)
    is_own = any(getattr(cls, name) is not getattr(nn.Module, name) for name in _ACCESS)
    if is_own or cls.forward is not known.forward or "forward" in vars(module):
        return f"has another forward than nn.{known.__name__}"
    if not _has_just(module, KNOWN[known]):
        return f"has other parameters than nn.{known.__name__}, or computes them"
    return "has hooks, which would see shards" if has_hooks(module) else None


def is_seen_through(module: nn.Module, *, to_functions: bool) -> bool:
    """Return whether a module stands for the modules and functions that it calls.

    Args:
        to_functions: whether code of the user's that holds parameters, and calls no modules, does so too.
    """
    if any(True for _ in module.children()):
        return True
    if has_hooks(module) or any(True for _ in module.buffers()):
        return False
    if not any(True for _ in module.parameters()):
        return True
    is_of_torch = type(module).__module__.partition(".")[0] == "torch"
    return to_functions and not is_of_torch and why_not_placed(module) is not None


def _has_just(module: nn.Module, names: frozenset[str]) -> bool:
    """Return whether a module holds these parameters, in their place, and nothing else."""
    parameters = module._parameters  # noqa: SLF001 (those that are None count too)
    others = any(True for _ in (*module.buffers(), *module.children()))
    hidden = any(name in vars(module) or hasattr(type(module), name) for name in names)
    return (
        parameters.keys() == names
        and not others
        and not hidden
        and all(type(each) is nn.Parameter for each in parameters.values() if each is not None)
    )

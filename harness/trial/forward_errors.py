"""Errors of torch in forward, told with our option and the remedy."""

from __future__ import annotations

import re

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.errors import ConfigError
from harness.models.base import Batch
from strategies.base import StrategyError
from strategies.estimate.tensors import dtype_name
from strategies.last_words import last_words, refuses_hooks
from strategies.nested.inputs import line_of_error
from strategies.regions.blocks import unwrapped

_UNLIKE = re.compile("same dtype|expected scalar type|should be the same")
_UNREDUCED = "Expected to have finished reduction in the prior iteration"
_SHOWN = 4


def explained(error: RuntimeError, model: nn.Module, batch: Batch) -> ConfigError | StrategyError | None:
    """Return the same as a refusal that names the option; `None` where torch's words have to do.

    Args:
        error: what forward raised.
    """
    words = last_words(error).message
    if words.startswith(_UNREDUCED):
        return _without_gradients(words, model)
    if refuses_hooks(error):
        place = f" ({line})" if (line := line_of_error(error)) else ""
        problem = f"gradients of torch.func{place} stand in a block, and torch allows no region around them"
        return StrategyError(
            "ac", f"{problem}; take other blocks, or ac=budget, which leaves such ones as they are"
        )
    return _other_dtypes(words, model, batch) if _UNLIKE.search(words) else None


def _without_gradients(words: str, model: nn.Module) -> ConfigError:
    """Return the refusal of parameters that DDP waits for; it counts those that require gradients."""
    names = [name for name, each in unwrapped(model).named_parameters() if each.requires_grad]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", words)
    unused = [names[int(at)] for at in found.group(1).split()] if found else ["a parameter"]
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    listed = ", ".join(map(repr, unused[:_SHOWN])) + more
    problem = f"DDP waits for the gradient of every parameter, and a step gives none to {listed}"
    return ConfigError("mesh", f"{problem}; use mesh=shard2, or freeze them in the factory")


def _other_dtypes(words: str, model: nn.Module, batch: Batch) -> ConfigError | None:
    leaves = [leaf for leaf in tree_leaves((batch.inputs, dict(batch.keywords))) if isinstance(leaf, Tensor)]
    of_inputs = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
    of_parameters = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if not of_inputs - of_parameters:
        return None
    given, kept = (
        " and ".join(sorted(map(dtype_name, dtypes))) for dtypes in (of_inputs - of_parameters, of_parameters)
    )
    problem = f"inputs are {given}, as the factory gives them, and parameters are {kept} ({words})"
    return ConfigError("dtype", f"{problem}; use dtype=bf16_mixed, or let the factory give inputs in {kept}")

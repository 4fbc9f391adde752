"""The proof of a written file: a model trains bit for bit as the plain one, and holds less for backward."""

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from strategies.written.runtime.found_blocks import NAME
from strategies.written.runtime.run_again import apply


class Held(TorchDispatchMode):
    """Knows the storages that operators made on a device, as long as they live."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.storages = device, WeakIdKeyDictionary()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        made = [each.untyped_storage() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.storages.update({each: each.nbytes() for each in made if each.device.type == self.device.type})
        return result


def example(made: Any) -> tuple[nn.Module, Any, Callable[[Any], Any]]:
    """Return the model of a factory, what it reads, and the loss of its outputs."""
    if isinstance(made, nn.Module):  # from tokens to logits
        size = next(each.num_embeddings for each in made.modules() if isinstance(each, nn.Embedding))
        tokens = torch.randint(size, (2, 16))
        return made, tokens, lambda out: getattr(out, "logits", out).float().logsumexp(-1).mean()
    model, inputs, loss_fn = made
    if not callable(inputs):
        return model, inputs, loss_fn
    drawn, targets = inputs(4)  # a function of the batch size
    return model, drawn, lambda out: loss_fn(out, targets)


def trained(make: Callable[[], Any], device: torch.device, *, plain: bool, autocast: bool) -> Any:
    """Return the bits of all that two steps compute, by name, and the bytes that wait for backward."""
    torch.manual_seed(0)
    with torch.device(device):
        model, given, loss_fn = example(make())
    model, given = model.to(device), tree_map_only(Tensor, lambda each: each.to(device), given)
    args = () if isinstance(given, Mapping) else given if isinstance(given, tuple) else (given,)
    model = model if plain else apply(model)
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast), Held(device) as held:
            loss = loss_fn(model(*args, **(given if isinstance(given, Mapping) else {})))
        waiting = sum(held.storages.values())
        loss.backward()
    of_device = torch if device.type == "cpu" else torch.get_device_module(device)
    found = {"loss": loss, "random numbers": of_device.get_rng_state()}
    found |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    found |= {f"buffer {name}": each for name, each in model.named_buffers()}
    dense = {name: each.detach().cpu().to_dense() for name, each in found.items() if each is not None}
    return {name: bytes(each.reshape(-1).view(torch.uint8).numpy()) for name, each in dense.items()}, waiting


def value(text: str) -> Any:
    """Return an argument of the factory: a number, a list, True, None; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def proof(factory: str, options: list[str]) -> tuple[bool, str]:
    """Return whether the file holds on the device at hand, for what a factory makes, and how it shows."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    module, _, function = factory.partition(":")
    given = {name: value(text) for name, text in (each.split("=", 1) for each in options if "=" in each)}
    make = partial(getattr(import_module(module), function), **given)
    run = partial(trained, make, device, autocast="--autocast" in options)

    (expected, before), (again, _) = run(plain=True), run(plain=True)
    if expected != again:
        return False, f"the plain model differs from itself on {device}, so nothing can be proven"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, after = run(plain=False)
    differing = [name for name in expected | found if expected.get(name) != found.get(name)]
    problems = [str(each.message) for each in said if str(each.message).startswith(NAME)]
    if differing:
        problems.append(f"{differing[0]} differs, as {len(differing)} of {len(expected)} do")
    if after >= before:
        problems.append(f"{after:,} bytes wait for backward, and {before:,} without it")
    equal = f"{len(expected)} tensors are equal in all bits on {device}"
    proven = f"{equal}, {before:,} -> {after:,} bytes wait for backward"
    return not problems, "; ".join(problems) or proven


def main(*words: str) -> None:
    """Prove what the file does, and exit with 1 where it does not hold."""
    known = [word for word in words[2:] if word == "--autocast" or ("=" in word and word[0] not in "-=")]
    if words[:1] != ("--check",) or ":" not in "".join(words[1:2]) or len(known) < len(words[2:]):
        sys.stderr.write(f"usage: python {NAME}.py --check module:function [name=value ...] [--autocast]\n")
        sys.exit(2)
    sys.path.insert(0, str(Path.cwd()))
    try:
        holds, how = proof(words[1], list(words[2:]))
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        holds, how = False, f"{type(error).__name__}: {error}"
    sys.exit(None if print(f"{NAME} {'holds' if holds else 'does not hold'}: {how}") or holds else 1)

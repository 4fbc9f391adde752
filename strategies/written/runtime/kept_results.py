"""Blocks that run again in backward, but for the results that rules name."""

import threading
import warnings
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.written.runtime.called_again import called_again, storages
from strategies.written.runtime.found_blocks import NAME, found

RULES: list[tuple[list[str], list[str], list[str]]] = []
FAMILIES = {
    "linear": ("mm", "addmm", "linear", "mkldnn_linear", "_addmm_activation", "_scaled_mm", "_scaled_mm_v2"),
    "bmm": ("bmm", "baddbmm", "matmul", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    "convolution": ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
}
WRITTEN = -1  # no version: the result was written to
running, reported = threading.local(), threading.Event()
named: set[tuple[str, str]] = set()  # what ran in forwards since `apply`


def family(op: Any) -> str | None:
    """Return the family of an operator: attention whatever its kernel, none where it costs little."""
    name = getattr(op, "__name__", str(op)).split(".")[0].rstrip("_")
    if "softmax" in name:
        return None if "log" in name else "softmax"
    if "attention" in name or "attn" in name:
        return "attention"
    return next((kind for kind, names in FAMILIES.items() if name in names), None)


def random_state(device: torch.device, state: Tensor | None = None) -> Any:
    """Return the state of the random numbers of a device, or set it."""
    if device.type == "cpu":
        return torch.get_rng_state() if state is None else torch.set_rng_state(state)
    module = torch.get_device_module(device)
    return module.get_rng_state(device) if state is None else module.set_rng_state(state, device)


def arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name; none of an operator without a schema."""
    names = [each.name for each in op._schema.arguments] if hasattr(op, "_schema") else []
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Rules(TorchDispatchMode):
    """Keeps in forward the results that rules name, and gives them back when the block runs again."""

    supports_higher_order_operators = True

    def __init__(self, fqn: str, keep: Any, kept: dict[str, Any], named: set[Any], *, again: bool) -> None:
        super().__init__()
        self.fqn, self.keep, self.kept, self.named, self.again = fqn, keep, kept, named, again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: what is compiled inside of a block stays so."""
        return True

    def __enter__(self) -> Any:
        if self.again and not reported.is_set():  # a whole forward is over
            reported.set()
            report()
        running.mode = self.begun()
        return super().__enter__()

    def begun(self) -> Any:
        """Return itself, at the start of a forward."""
        self.stack, self.calls = [""], Counter[str]()
        self.products, self.scored = dict[str, str](), set[str]()
        self.on = dict[int, list[str]]()  # rules by the storage of what they keep
        return self

    def enter(self, name: str) -> None:
        """Take note that a module of the block begins to run."""
        self.stack.append(f"{name}@{self.calls[name]}" if self.calls[name] else name)
        self.calls[name] += 1

    def entered(self, name: str, *_: Any) -> None:
        """Take note of it, unless another thread runs the module, which meets the same hooks."""
        if running.mode is self:
            self.enter(name)

    def left(self, *_: Any) -> None:
        """Take note that it has returned."""
        if running.mode is self:
            self.stack.pop()

    def rule(self, op: Any) -> str | None:
        """Return the name of a call: module, family and, from the second on, its number."""
        kind, module = family(op), self.stack[-1]
        if kind == "softmax":  # the product before it is part of attention, and always runs again
            self.scored.add(module)
            product = self.products.pop(module, "")
            self.named.difference_update([] if product in self.keep else [(self.fqn, product)])
        if kind == "bmm" and module in self.scored:  # softmax · V has the result of a fused kernel
            self.scored.remove(module)
            kind = "attention"
        if kind in (None, "softmax"):
            return None
        rule = f"{module}:{kind}"
        self.calls[rule] += 1
        rule += f"#{self.calls[rule] - 1}" if self.calls[rule] > 1 else ""
        if kind == "bmm":
            self.products[module] = rule
        return rule

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = self.rule(op), kwargs or {}
        if self.again and rule in self.kept:
            return self.given_back(rule, str(op))
        result = op(*args, **kwargs)
        if self.on and not self.again:
            self.watch(op, args, kwargs, result)
        if not self.again and rule:
            self.named.add((self.fqn, rule))
        if not self.again and rule and rule in self.keep:
            # what is kept counts the writes to the result
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                alias = tree_map_only(Tensor, Tensor.detach, result)
            tensors = [each for each in tree_leaves(alias) if isinstance(each, Tensor)]
            draws = arguments(op, args, kwargs).get("dropout_p")
            state = random_state(tensors[0].device) if draws else None
            self.kept[rule] = str(op), alias, tensors, [each._version for each in tensors], state
            for storage in storages(alias):
                self.on.setdefault(storage, []).append(rule)
        return result

    def watch(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of writes to what is kept, and of views of it that have own counters (`_unsafe_view`)."""
        given = arguments(op, args, kwargs)
        for argument in op._schema.arguments if hasattr(op, "_schema") else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                for rule in [
                    each for on in storages(given.get(argument.name)) for each in self.on.get(on, ())
                ]:
                    self.kept[rule][3].append(WRITTEN)
        for tensor in tree_leaves(result):
            for rule in [each for on in storages(tensor) for each in self.on.get(on, ())]:
                with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                    self.kept[rule][2].append(tensor.detach())
                self.kept[rule][3].append(tensor._version)

    def given_back(self, rule: str, name: str) -> Any:
        """Return what forward has kept, and let what draws next draw what it drew there."""
        kept_name, result, tensors, versions, state = self.kept.pop(rule)
        where = f"{NAME}: {self.fqn} {rule} was"
        if name != kept_name:
            raise RuntimeError(f"{where} {kept_name} in forward, and is {name} in backward")
        if versions != [each._version for each in tensors]:
            raise RuntimeError(f"{where} written to in place afterwards; remove this rule")
        if state is not None:
            random_state(tensors[0].device, state)
        return result


# rules follow what runs, so these blocks stay eager where the model is compiled
@torch._disable_dynamo  # type: ignore[attr-defined]
def forward(block: nn.Module, fqn: str, keep: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, and again in backward with the results that it keeps."""
    own, kept = type(block).forward, dict[str, Any]()
    if not torch.is_grad_enabled():
        return own(block, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as hooks:
            for name, module in [*block.named_modules()][1:]:
                entered = module.register_forward_pre_hook(partial(running.mode.entered, name))
                left = module.register_forward_hook(running.mode.left)
                hooks.callback(entered.remove)
                hooks.callback(left.remove)
            return own(*args, **kwargs)

    modes = (Rules(fqn, keep, kept, named, again=False), Rules(fqn, keep, kept, named, again=True))
    return called_again(block, run, args, kwargs, context_fn=lambda: modes)


def report() -> None:
    """Warn, in the first backward, of rules that named nothing and of operators without a rule."""
    planned = {(fqn, rule) for blocks, keep, again in RULES for fqn in blocks for rule in keep + again}
    for what, those in {
        "rules named nothing": planned - named,
        "operators have no rule": named - planned,
    }.items():
        if those:
            first = ", ".join(f"{fqn} {rule}" for fqn, rule in sorted(those)[:5])
            warnings.warn(f"{NAME}: {len(those)} {what}, so bytes are not as planned: {first}", stacklevel=2)


def apply(model: nn.Module) -> nn.Module:
    """Return `model`, whose blocks run again in backward, but for what `RULES` let stay."""
    keeps = {fqn: frozenset(keep) for blocks, keep, _ in RULES for fqn in blocks}
    for fqn, block in found(model, keeps).items():
        block.forward = partial(forward, block, fqn, keeps[fqn])  # type: ignore[method-assign]
    named.clear()
    reported.clear()
    return model

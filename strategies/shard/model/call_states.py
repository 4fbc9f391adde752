"""States of a call: in which states a torch function may read its tensors, and in which its result then is.

No resharding can be put before a function in the model's code; it runs on what its producers give.
`states_of_call` lists the states that fit together: every rank's result is then its part of the whole result.
A function without a rule reads and gives whole tensors, which is right for every function.

A gradient is linear in the gradient that comes back to it, so any function with a rule passes summands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from strategies.shard.model.call_rules import (
    ATTENTION,
    RULES,
    CallRule,
    FunctionCall,
    TensorStates,
    as_summand,
)
from strategies.shard.model.placement_state import SUMMED, WHOLE, State, TensorValue, sharded

_OF_TORCH = frozenset(
    {"torch", "torch._tensor", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator"}
)
"""Modules whose functions the names of rules are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStates:
    """States of a call's tensors that fit together.

    Fields:
        inputs: states of the tensors that the function reads, in their order.
        output: state of its result, or of each of several results.
    """

    inputs: tuple[State, ...]
    output: State


def states_of_call(node: fx.Node, inputs: Sequence[TensorValue | None], ranks: int) -> tuple[CallStates, ...]:
    """Return in which states a call may run, the one on whole tensors first.

    Args:
        node: the call, with what it gives in `meta["val"]`.
        inputs: tensors that it reads, in the order of `sources_of`; `None` for what is no tensor.
        ranks: number of ranks on the mesh axis.
    """
    whole = CallStates(inputs=(WHOLE,) * len(inputs), output=WHOLE)
    call = _call(node, inputs)
    given = outputs_of(node)
    mutates = bool(node.meta.get("mutates"))
    if call is None or (mutates and not _changes_its_first(node)):
        return (whole,)
    found = [whole]
    if given[0].needs_gradient and not mutates:
        found.append(CallStates(inputs=tuple(map(as_summand, call.values.values())), output=SUMMED))
    for dim in range(len(given[0].shape)):
        if all(value.can_be_cut(dim, ranks) for value in given):
            states = _states(call, RULES[function_name(node)].states(call, dim), ranks)
            if states is not None:
                found.append(CallStates(inputs=states, output=sharded(dim)))
    return tuple(found)


def sources_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes whose results a call reads, without those of mere sizes."""
    return tuple(source for source in node.all_input_nodes if "val" in source.meta)


def rule_of(node: fx.Node) -> CallRule | None:
    """Return what is known of the function that a node calls, if anything."""
    is_known = node.op == "call_method" or getattr(node.target, "__module__", None) in _OF_TORCH
    return RULES.get(function_name(node)) if is_known else None


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers, as many as its tensors have elements on this rank."""
    name = function_name(node)
    if name == "dropout":
        is_on = argument(node, "training", 2, default=True) and argument(node, "train", 2, default=True)
        return bool(is_on) and argument(node, "p", 1, default=0.5) > 0
    return name == ATTENTION and argument(node, "dropout_p", 4, default=0.0) > 0


def attention_flops(node: fx.Node, inputs: Sequence[TensorValue | None]) -> int:
    """Return the FLOPs of scores and values in one step, forward and backward; 0 for other functions.

    The whole square is counted; a causal kernel may skip half of it.
    """
    call = _call(node, inputs)
    if call is None or function_name(node) != ATTENTION:
        return 0
    query, key, value = (call.values[call.arguments[name]].shape for name in ("query", "key", "value"))
    # backward, each of the two products has two others
    passes = 3 if any(each.needs_gradient for each in call.values.values()) else 1
    return passes * 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def is_view(node: fx.Node) -> bool:
    """Return whether a call gives what its input holds already."""
    rule = rule_of(node)
    return rule is not None and rule.is_view


def outputs_of(node: fx.Node) -> tuple[TensorValue, ...]:
    """Return the tensors that a call gives: one, or the parts of a tuple."""
    given = node.meta.get("val")
    if isinstance(given, Tensor):
        return (TensorValue.of(given),)
    if isinstance(given, tuple | list) and all(isinstance(part, Tensor) for part in given):
        return tuple(TensorValue.of(part) for part in given)
    return ()


def function_name(node: fx.Node) -> str:
    """Return what a function is called, whether it is a method, an operator or of `torch`; else nothing."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    return str(getattr(node.target, "__name__", "")).strip("_") if node.op == "call_function" else ""


def argument(node: fx.Node, name: str, position: int, *, default: Any) -> Any:
    """Return an argument of a call, given by name or by position."""
    given = node.kwargs.get(name, default)
    return node.args[position] if position < len(node.args) else given


def _call(node: fx.Node, inputs: Sequence[TensorValue | None]) -> FunctionCall | None:
    rule, given = rule_of(node), outputs_of(node)
    values = {
        source: value for source, value in zip(sources_of(node), inputs, strict=True) if value is not None
    }
    if rule is None or not given or not values or len(values) < len(inputs):
        return None
    return rule.call(node, values, given[0])


def _changes_its_first(node: fx.Node) -> bool:
    """Return whether a call changes its first tensor, one element after another, and returns it."""
    rule, first = rule_of(node), node.args[0] if node.args else None
    changed = node.meta["mutates"]
    return (
        rule is not None
        and rule.is_elementwise
        and isinstance(first, fx.Node)
        and len(changed) == 1
        and changed[0] is first.meta["val"] is node.meta["val"]
    )


def _states(call: FunctionCall, operands: TensorStates | None, ranks: int) -> tuple[State, ...] | None:
    """Return the states of all tensors in order; `None` where one is in two, or cannot be."""
    if operands is None:
        return None
    found: dict[fx.Node, State] = {}
    for node, state in operands:
        if found.setdefault(node, state) != state:
            return None
        if state.dim is not None and not call.values[node].can_be_cut(state.dim, ranks):
            return None
    return tuple(found[node] for node in call.values) if found.keys() == call.values.keys() else None

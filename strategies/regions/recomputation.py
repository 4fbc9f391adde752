"""The region that recomputes: `torch.utils.checkpoint` around a module, both implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from strategies.base import Observation
from strategies.regions.blocks import Chunked, Disguised
from strategies.regions.operator_names import SaveList
from strategies.regions.outside_tensors import FoundTensors, OutsideTensors
from strategies.regions.own_parameters import with_own_parameters
from strategies.regions.policy import Within, is_traced, selective_contexts
from strategies.regions.rewind import Contexts, EachTimeAround, Rewind, RewoundCall, all_modules
from strategies.regions.saved_tensors import likened, without_graph
from strategies.regions.split_backward import holding
from strategies.regions.torch_facts import selective_takes_hooks


@dataclass(kw_only=True, slots=True)
class Recomputation:
    """A region whose activations are dropped in forward and computed again in backward.

    Fields:
        preserve_rng_state: recompute with the random numbers of forward.
        early_stop: end a recomputation when the last needed tensor is there (not reentrant).
        use_reentrant: the older implementation, which runs forward without autograd.
        save_list: operators whose outputs are kept; `None` keeps none.
        within: says which of its entries count in the module that forward is in; `None`: all do.
        policy: a policy function of torch, which says itself what is kept; `None`: the save list does.
        rewind: the state that a recomputation finds as forward did; `None` leaves it as it is by then.
        fired: entries of `save_list` that an operator in forward has matched, in any step.
        asks_for_parameters: refuse other parameters than forward's; false where the body does that.
        split_backward: what stays between the parts of a backward; not of compiled or reentrant regions.
        fqn: name of the module in the model, for messages; empty where that is not known.
    """

    preserve_rng_state: bool
    early_stop: bool
    use_reentrant: bool
    save_list: SaveList | None = None
    within: Within | None = None
    policy: Callable[..., Any] | None = None
    rewind: Rewind | None = None
    fired: set[str] = field(default_factory=set)
    asks_for_parameters: bool = True
    split_backward: str = "torch"
    fqn: str = ""
    _outside: OutsideTensors = field(init=False)
    _saving: Callable[[], Any] | None = field(init=False)
    _hooks: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        self._outside = OutsideTensors(is_rewound=self.rewind is not None)
        # made here and not in a call, which a compiler may record
        if self.policy is not None:
            self._saving = partial(create_selective_checkpoint_contexts, self.policy)
        elif self.save_list is not None:
            self._saving = _saver(self.save_list, self.fired, self.within)
        else:
            self._saving = None
        self._hooks = {"respect_saved_tensors_hooks": False} if selective_takes_hooks() else {}

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.__post_init__()

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, recomputed in backward where gradients are asked for.

        Raises:
            StrategyError: in backward, where the module has other parameters than in forward.
            RuntimeError: in backward, in the words of autograd, where it needs what follows from a tensor
                that was written to since.
        """
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        found = None
        if not (torch.compiler.is_compiling() or is_traced()):
            found = self._outside.found_by(module, (*args, *kwargs.values()), self.fqn)
            if self.asks_for_parameters:
                body = with_own_parameters(module, body, found.held)
            # what a region has kept answers before what follows its operators
            body = found.following(body) if self._saving is None else found.ending(body)
        call = None if self.rewind is None else self.rewind.call(module)
        if self.use_reentrant:
            return self._reentrant(module, body if call is None else call.whole(body), args, kwargs)
        body = body if call is None else call.body(body)
        return self._non_reentrant(body, args, kwargs, self._contexts(call, found))

    def observe(self) -> Observation:
        """Return the named operators and those that have never fired here."""
        named = self.save_list.named if self.save_list is not None else ()
        return Observation(named=named, never_fired=tuple(n for n in named if n not in self.fired))

    def _non_reentrant(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: dict[str, Any],
    ) -> Any:
        """Run `body` in torch's checkpoint, with keyword arguments as positions."""
        # keyword tensors travel as positions: torch looks for devices with RNG state only there
        names, count = tuple(kwargs), len(args)

        def run(*inputs: Any) -> Any:
            return body(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

        holds = self.split_backward != "torch" and not torch.compiler.is_compiling()
        return checkpoint(
            holding(run, self.split_backward) if holds else run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            early_stop=self.early_stop,
            **contexts,
        )

    def _contexts(self, call: RewoundCall | None, found: FoundTensors | None) -> dict[str, Any]:
        """Return the options of `checkpoint` that keep the outputs of the save list and put state back."""
        saving = self._saving
        if saving is None:
            return {} if call is None else {"context_fn": partial(call.contexts, noop_context_fn)}
        if found is not None:
            saving = partial(_watched, saving, found)
        return {"context_fn": saving if call is None else partial(call.contexts, saving), **self._hooks}

    def _reentrant(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `body` in torch's reentrant checkpoint, which sees flat positional tensors alone."""
        # this implementation sees neither keywords nor nested structures: both sides are flattened
        inputs, inputs_spec = tree_flatten((args, kwargs))
        anchor = _anchor(module, inputs)
        if anchor is None and not _require_grad(inputs):
            return body(*args, **kwargs)  # a frozen region keeps nothing for backward
        outputs_spec = None
        given = [(type(leaf), vars(leaf)) if isinstance(leaf, Tensor) else None for leaf in inputs]
        past: dict[int, Tensor] = {}  # outputs by position that go past autograd's function

        def run(_anchor: Tensor | None, *leaves: Any) -> tuple[Any, ...]:
            nonlocal outputs_spec
            is_forward = outputs_spec is None
            found = (
                leaf if was is None else likened(leaf, *was) for leaf, was in zip(leaves, given, strict=True)
            )
            positional, keywords = tree_unflatten(found, inputs_spec)
            outputs, outputs_spec = tree_flatten(body(*positional, **keywords))
            if is_forward:
                past.update(_made_before(module, inputs, outputs))
                outputs = [_apart(each, inputs) for each in outputs]
            return tuple([None if at in past else each for at, each in enumerate(outputs)])

        outputs = checkpoint(
            run, anchor, *inputs, use_reentrant=True, preserve_rng_state=self.preserve_rng_state
        )
        assert outputs_spec is not None
        return tree_unflatten([past.get(at, each) for at, each in enumerate(outputs)], outputs_spec)


def _watched(saving: Callable[[], Contexts], found: FoundTensors) -> Contexts:
    """Return the contexts of `saving`; a recomputation follows what was written to since."""
    forward, recompute = saving()
    return forward, EachTimeAround(found.repeating, recompute)


def can_run_again(module: nn.Module) -> bool:
    """Say whether nothing inside of `module` sees its forward run twice: neither hooks, units nor chunks."""
    inside = all_modules(module)[1:]
    return not any(map(_sees_calls, inside)) and not isinstance(module, Chunked)


def _sees_calls(module: nn.Module) -> bool:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    is_wrapped = isinstance(module, FSDPModule | FullyShardedDataParallel | Disguised)
    return is_wrapped or any(vars(module).get(name) for name in hooks)


def _made_before(module: nn.Module, inputs: list[Any], outputs: list[Any]) -> dict[int, Tensor]:
    """Return the outputs of a forward without autograd, by position, that are older than it.

    As an output of autograd's function such a tensor, a buffer or a parameter, would get a history and keep
    it: its own recomputation would then be asked for its gradient.
    """
    stored = {
        id(tensor)
        for part in all_modules(module)
        for tensors in (vars(part), part._buffers)  # noqa: SLF001 (without names)
        for tensor in tensors.values()
        if isinstance(tensor, Tensor)
    }
    given = {id(each) for each in inputs}
    return {
        at: each
        for at, each in enumerate(outputs)
        if isinstance(each, Tensor)
        # what is made without autograd requires no gradient; an input that requires one goes through
        and (not each.requires_grad if id(each) in given else each.requires_grad or id(each) in stored)
    }


def _apart(output: Any, inputs: list[Any]) -> Any:
    """Return an output on the same memory that only the region's caller has, unless it is an input.

    So one that is older and that nobody knows, in a container or a closure, gets no history either.
    """
    if not isinstance(output, Tensor) or any(output is each for each in inputs):
        return output
    return without_graph(output)


def _saver(save_list: SaveList, fired: set[str], within: Within | None) -> Callable[[], Any]:
    """Return the `context_fn` of a save list: a function, because a compiler copies what a partial holds."""

    def saving() -> Any:
        return selective_contexts(save_list, fired, within)

    return saving


def _anchor(module: nn.Module, inputs: list[Any]) -> Tensor | None:
    """Return an empty input that requires grad where no other does and parameters do.

    Without one, the outputs of a region whose inputs are token numbers would not require grad, and its
    parameters would silently get no gradient.
    """
    if _require_grad(inputs) or not _require_grad(module.parameters()):
        return None
    device = next((leaf.device for leaf in inputs if isinstance(leaf, Tensor)), None)
    return torch.empty(0, device=device, requires_grad=True)


def _require_grad(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(list(values)))

"""Tensors that a forward finds outside of itself: its recomputation has to find them as forward left them.

Autograd asks for the versions of tensors that it saves. A recomputation reads more: a bias, a table, a mask.
Where one was written to since, gradients would be of two models, and nobody would say so.

Looked at are the parameters, buffers and other tensors that the modules of a region hold, those in containers
among its arguments, and those that functions name: globals, variables of closures, attributes of classes.
What forward itself writes to, such as running statistics, is state (`regions.rewind`). Torch counts neither
writes through `.data` nor those of optimizers with `fused=True`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.estimate.tensors import dtype_name
from strategies.regions.blocks import plain_class
from strategies.regions.rewind import all_modules
from strategies.regions.spoilt_values import Past, SpoiltValues
from strategies.regions.tensor_holders import TensorHolders, is_container, names_of
from strategies.regions.versions import versions_of


class OutsideTensors:
    """Finds the tensors outside of the forwards of regions.

    Args:
        is_rewound: a recomputation finds what modules hold besides parameters as forward did.
    """

    def __init__(self, *, is_rewound: bool = False) -> None:
        self._is_rewound = is_rewound
        self._holders: weakref.WeakKeyDictionary[nn.Module, TensorHolders] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OutsideTensors, is_rewound=self._is_rewound), ()

    def found_by(self, module: nn.Module, inputs: Iterable[Any], fqn: str = "") -> FoundTensors:
        """Return what a forward of `module` finds that begins now.

        Args:
            inputs: its arguments; whoever keeps them asks for the versions of tensors among them.
            fqn: name of the module in the model, for messages; empty where that is not known.
        """
        parts = all_modules(module)
        holders = self._holders.get(module)
        is_known = holders is not None and holders.are_of(parts)
        if holders is None or not is_known:
            holders = TensorHolders(module, parts)
        given = [leaf for each in inputs if is_container(each) for leaf in tree_leaves(each)]
        found = FoundTensors(
            module,
            fqn,
            held=holders.parameters(parts),
            state=holders.state(parts),
            others=[*holders.others(parts), *(each for each in given if isinstance(each, Tensor))],
            is_rewound=self._is_rewound,
        )
        if not is_known:  # the first forward may make what later ones find
            found.at_end = partial(self._look_again, module)
        return found

    def _look_again(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors that modules hold, and functions name, after the first forward."""
        parts = all_modules(module)
        holders = self._holders[module] = TensorHolders(module, parts)
        return [*holders.state(parts), *holders.others(parts)]


class FoundTensors:
    """The tensors that one forward has found, as it begins.

    Args:
        fqn: its name, or nothing.
        held: parameters.
        state: what modules hold besides.
        others: the others.
        is_rewound: a recomputation finds the state as forward did.

    Attributes:
        held: the parameters; when forward has ended, those that it has not written to.
        at_end: returns state and others once more, when forward has ended.
    """

    __slots__ = ("_fqn", "_loose", "_module", "_others", "_put_back", "_versions", "at_end", "held")

    def __init__(
        self,
        module: nn.Module,
        fqn: str,
        *,
        held: list[Tensor],
        state: list[Tensor],
        others: list[Tensor],
        is_rewound: bool,
    ) -> None:
        self._module, self._fqn = module, fqn
        self.held, self._others = held, [*state, *others]
        self._versions = versions_of(held), versions_of(self._others)
        self._put_back = frozenset(map(id, state if is_rewound else ()))
        self._loose: list[tuple[weakref.ref[Tensor], int]] | None = None
        self.at_end: Callable[[], list[Tensor]] | None = None

    def end(self) -> None:
        """Take note that forward has ended: what it has written to is its state."""
        before_held, before_others = self._versions
        self.held, held_versions = _unwritten(self.held, before_held)
        others, versions = _unwritten(self._others, before_others)
        if self.at_end is not None:
            known = set(map(id, self._others))
            made = [each for each in self.at_end() if id(each) not in known]
            others, versions = [*others, *made], [*versions, *versions_of(made)]
        self._versions = held_versions, versions
        self._loose = [(weakref.ref(each), version) for each, version in zip(others, versions, strict=True)]
        self._others, self.at_end = [], None

    def ending(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body`, of which the first call is the forward, and takes note when it ends."""
        return self._run(body, nullcontext)

    def following(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body`, of which the first call is the forward, and others are `repeating`."""
        return self._run(body, self.repeating)

    def repeating(self) -> AbstractContextManager[None]:
        """Return a scope for a recomputation, of which backward must not use what was written to since.

        Raises:
            RuntimeError: in backward, in the words of autograd, by what uses it.
        """
        past = self.past()
        return SpoiltValues(past).watching() if past else nullcontext()

    def past(self) -> list[Past]:
        """Return the tensors that were written to since; none before forward has ended."""
        if self._loose is None:
            return []
        found = (
            []
            if versions_of(self.held) == self._versions[0]
            else [*zip(self.held, self._versions[0], strict=True)]
        )
        found += [(each, expected) for refers, expected in self._loose if (each := refers()) is not None]
        return [
            Past(each, self._words(each, expected), is_put_back=id(each) in self._put_back)
            for each, expected in found
            if versions_of((each,)) != [expected]
        ]

    def _run(
        self, body: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        is_forward = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_forward
            if not is_forward:
                with around():
                    return body(*args, **kwargs)
            is_forward = False
            result = body(*args, **kwargs)
            self.end()
            return result

        return run

    def _words(self, tensor: Tensor, expected: int) -> str:
        block = repr(self._fqn) if self._fqn else f"a {plain_class(self._module).__name__}"
        name = next(names_of(tensor, self._module), "")
        named = repr(f"{self._fqn}.{name}") if self._fqn else f"{name!r} of {block}"
        return written_to(named if name else "", tensor, expected, block)


def written_to(name: str, tensor: Tensor, expected: int, reader: str) -> str:
    """Return what was written to since forward, as autograd says it, and what to do.

    Args:
        name: name of the tensor; empty where it has none.
        tensor: the tensor, of which forward found the version `expected`.
        reader: what runs again and reads it.
    """
    size = f"[{dtype_name(tensor.dtype)} {list(tensor.shape)}]"
    version = f"is at version {versions_of((tensor,))[0]}; expected version {expected} instead"
    remedy = f"{reader} reads it again in backward: write to it after backward"
    return f"{name}{name and ', '}{size} {version}; {remedy}"


def _unwritten(tensors: list[Tensor], before: list[int]) -> tuple[list[Tensor], list[int]]:
    """Return those of `tensors` that nobody has written to, with their versions."""
    now = versions_of(tensors)
    if now == before:
        return tensors, now
    same = [at for at, version in enumerate(now) if version == before[at]]
    return [tensors[at] for at in same], [now[at] for at in same]

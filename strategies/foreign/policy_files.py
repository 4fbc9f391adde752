"""Policies that others have written, read from their files: what of each block stays for backward.

`.py`: a policy function of torch, `policy_fn`. `.yaml`: regions of torch-remat, by block. Any other file:
lines that select operators, `MODULE::OPERATOR`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

import torch
import yaml

from strategies.base import StrategyError
from strategies.regions import operator_names, recomputation, region, selectors

if TYPE_CHECKING:
    from torch import nn

    from strategies.budget.export.operator_modules import BlockForward
    from strategies.regions.operator_names import SaveList

NAME = "policy_fn"
"""Name of the function in a file, as torch's own examples have it."""

_LINEAR = frozenset({"aten.mm.default", "aten.addmm.default"})
"""Operators that are the same on every device: kernels of attention and of norms are not."""

_CODE = ".py"
_REGIONS = frozenset({".yaml", ".yml"})
_POSITIONAL = frozenset({Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD})
_ANY = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
_POLICY_TAKES = 2
"""Positional arguments of a policy: a context and an operator; operands follow."""


class PolicyFile(Protocol):
    """A file that says what of blocks stays."""

    def check(self, found: Mapping[str, nn.Module]) -> None:
        """Look at the blocks of a whole model, by FQN.

        Raises:
            StrategyError: it names what is not there, with the nearest names.
        """

    def check_operators(self, forwards: Callable[[], Mapping[str, BlockForward]]) -> None:
        """Look at the operators that blocks run, by FQN, where the policy names some.

        Raises:
            StrategyError: it names one of linear layers that its module does not run.
        """

    def enclose(self, found: Mapping[str, nn.Module]) -> None:
        """Put regions around blocks, which may be those of a part of the model."""


def is_code(path: str) -> bool:
    """Say whether a file is Python, by its name."""
    return PurePath(path).suffix == _CODE


def is_of_regions(path: str) -> bool:
    """Say whether a file has regions of torch-remat, by its name."""
    return PurePath(path).suffix in _REGIONS


def is_policy(function: Any) -> bool:
    """Say whether a function can be called as torch calls a policy: `(ctx, op, *args, **kwargs)`."""
    try:
        taken = signature(function).parameters.values() if callable(function) else ()
    except ValueError:  # some builtins do not tell
        return False
    kinds = [each.kind for each in taken if each.default is Parameter.empty]
    positional = [kind for kind in kinds if kind in _POSITIONAL]
    return len(positional) == _POLICY_TAKES and kinds[len(positional) :] == _ANY


def of_text(path: str, text: str, where: str) -> PolicyFile:
    """Return the policy in a file that is no code.

    Args:
        where: configuration path that messages name.

    Raises:
        StrategyError: naming the line or block that cannot be understood.
    """
    if is_of_regions(path):
        return _remat_regions(path, text, where)
    lines = (part.strip() for line in text.splitlines() for part in line.partition("#")[0].split("|"))
    found = tuple(dict.fromkeys(_spaceless(each) for each in lines if each))
    if not found:
        problem = f"{path!r} selects nothing; write lines such as layers.*.mlp::aten.mm.default"
        raise StrategyError(where, problem)
    twofold = next((each for each in found if each.count(selectors.SEPARATOR) > 1), None)
    if twofold is not None:
        problem = f"{path!r}: {twofold!r} has more than one '::'; write a line for each module"
        raise StrategyError(where, problem)
    try:
        save_list = operator_names.resolve(found, 0)
    except StrategyError as error:
        raise StrategyError(where, f"{path!r}: {error.problem}") from error
    return _Selectors(save_list=save_list, where=where)


def of_function(path: str, function: Any, where: str) -> PolicyFile:
    """Return the policy of a function. Raises StrategyError: it cannot be called as torch calls a policy."""
    if not is_policy(function):
        problem = f"{NAME} of {path!r} is no policy of torch, which takes (ctx, op, *args, **kwargs)"
        raise StrategyError(where, problem)
    return _OfTorch(function=function, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfTorch:
    """A policy function, asked about each operator of each block by torch's own checkpoint."""

    function: Callable[..., Any]
    where: str

    def check(self, found: Mapping[str, nn.Module]) -> None:
        """Refuse nothing: it names no module."""

    def check_operators(self, forwards: Callable[[], Mapping[str, BlockForward]]) -> None:
        """Refuse nothing: it names no operator."""

    def enclose(self, found: Mapping[str, nn.Module]) -> None:
        for block in found.values():
            made = recomputation.Recomputation(
                preserve_rng_state=True,
                early_stop=True,
                use_reentrant=False,
                policy=self._answer,
                split_backward="hold",
            )
            region.enclose(block, made)

    def _answer(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the function says of an operator; whatever else torch is told, it recomputes.

        Raises:
            StrategyError: it says neither a policy nor true or false.
        """
        answer = self.function(ctx, op, *args, **kwargs)
        if not isinstance(answer, bool | torch.utils.checkpoint.CheckpointPolicy):
            problem = f"the policy answers {answer!r} for {op}; return a CheckpointPolicy of torch, or a bool"
            raise StrategyError(self.where, problem)
        return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selectors:
    """Lines that select the operators whose results stay."""

    save_list: SaveList
    where: str

    def check(self, found: Mapping[str, nn.Module]) -> None:
        selectors.refuse_unmatched(self.save_list.named, found, self.where)

    def check_operators(self, forwards: Callable[[], Mapping[str, BlockForward]]) -> None:
        named = [each for each in self.save_list.named if each.rpartition(selectors.SEPARATOR)[2] in _LINEAR]
        if not any(selectors.SEPARATOR in each for each in named):
            return
        known = forwards()
        if not known:
            return
        run = {
            (f"{fqn}.{module}" if module else fqn, operator)
            for fqn, forward in known.items()
            for module, operator in zip(forward.modules, forward.operators, strict=True)
        }
        selectors.refuse_idle(named, run, self.where)

    def enclose(self, found: Mapping[str, nn.Module]) -> None:
        selectors.enclose(found, self.save_list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RematRegions:
    """Submodules that torch-remat keeps, by block; other blocks stay as they are."""

    of: Mapping[str, Sequence[str]]
    where: str

    def check(self, found: Mapping[str, nn.Module]) -> None:
        for fqn, names in self.of.items():
            if fqn not in found:
                known = ", ".join(map(repr, list(found)[:3])) if "*" in fqn else ""
                near = f"give blocks one by one, such as {known}" if known else selectors.nearest(fqn, found)
                raise StrategyError(self.where, f"{fqn!r} is no block of the model; {near}")
            inside = selectors.inside(found[fqn])
            for name in names:
                if name not in inside:
                    problem = f"{fqn!r} has no submodule {name!r}; {selectors.nearest(name, inside)}"
                    raise StrategyError(self.where, problem)
            region.refuse_own_forward({f"{fqn}.{name}": inside[name] for name in names})

    def check_operators(self, forwards: Callable[[], Mapping[str, BlockForward]]) -> None:
        """Refuse nothing: it names no operator."""

    def enclose(self, found: Mapping[str, nn.Module]) -> None:
        remat = import_module("strategies.regions.remat")  # an optional package
        for fqn, names in self.of.items():
            if fqn in found:  # else another stage has it
                outer = remat.Remat(preserve_rng_state=True)
                region.enclose(found[fqn], outer)
                remat.keep(found[fqn], names, outer)


def _remat_regions(path: str, text: str, where: str) -> _RematRegions:
    if find_spec("torch_remat") is None:
        problem = f"{path!r} has regions of torch-remat, which is not installed: pip install 'acbench[remat]'"
        raise StrategyError(where, problem)
    try:
        node, read = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except RecursionError as error:
        raise StrategyError(where, f"{path!r} is no YAML that can be read: it nests too deeply") from error
    except yaml.YAMLError as error:
        context, mark = getattr(error, "context", None), getattr(error, "context_mark", None)
        at = f"{context}, line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = f"{at}{getattr(error, 'problem', error)}"
        raise StrategyError(where, f"{path!r} is no YAML: {said}") from error
    is_of_lists = isinstance(read, dict) and all(
        isinstance(fqn, str) and isinstance(names, list) and all(isinstance(name, str) for name in names)
        for fqn, names in read.items()
    )
    if not is_of_lists or not read:
        problem = f"{path!r} must name submodules of blocks, as show=torch_remat prints them"
        raise StrategyError(where, f"{problem}: layers.0: [attention, mlp.up]")
    counts = Counter(key.value for key, _ in node.value)
    twice = next((fqn for fqn, count in counts.items() if count > 1), None)
    if twice is not None:
        problem = f"{path!r} names {twice!r} more than once; write all of its submodules in one list"
        raise StrategyError(where, problem)
    return _RematRegions(of=read, where=where)


def _spaceless(selector: str) -> str:
    """Return a selector without the spaces that may stand around `::`."""
    return selectors.SEPARATOR.join(part.strip() for part in selector.split(selectors.SEPARATOR))

"""Facts of an ATen operator that an executor of plans must know, as its schema and its tags say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from strategies.estimate.tensors import tensors_in

_aten = torch.ops.aten
_RUNNING_STATISTICS = ("running_mean", "running_var")
_UNTOLD_WRITES = {  # what these write to, and their schemas do not tell
    _aten.native_batch_norm.default: _RUNNING_STATISTICS,
    _aten.cudnn_batch_norm.default: _RUNNING_STATISTICS,
    _aten.miopen_batch_norm.default: _RUNNING_STATISTICS,
    _aten.batch_norm_update_stats.default: _RUNNING_STATISTICS,
    _aten.batch_norm_gather_stats.default: _RUNNING_STATISTICS,
    _aten.batch_norm_gather_stats_with_counts.default: _RUNNING_STATISTICS,
}
_UNTOLD_VIEWS = frozenset(  # their schemas do not tell that results lie on the storage of the argument
    {_aten._unsafe_view, _aten.unsafe_split, _aten.unsafe_split_with_sizes, _aten.unsafe_chunk}  # noqa: SLF001 (its name)
)
_MOVES_MEMORY = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
_COLLECTIVES = "_c10d_functional"
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"})
_TAGGED = frozenset({"aten", "prims", "prim", *_COMMUNICATION})

_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 (its name); whoever reads a result first adds it

Place: TypeAlias = tuple[int, str]
"""Position and name of an argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorFacts:
    """The facts of one operator.

    Fields:
        name: name and overload, `aten.mm.default`.
        writes: arguments that it writes to in place.
        is_fresh: whether its results lie on no storage of its arguments, as its schema says.
        is_untold: whether its schema does not tell of these writes, which do not change its results.
        training: argument that says whether it writes at all, where one does.
        makes: number of its results that are new, where it returns no list.
        makes_list: whether it returns a list of new tensors.
        chance: argument that says how much is random, where one does.
        is_random: whether it draws random numbers, as its tags say.
        is_untagged: whether its tags need not tell that; so for operators from outside of torch.
        communicates: whether ranks exchange something in it; no plan runs it again.
        names_group: whether its last argument is the name of a process group.
        is_collective: whether its results must be waited for.
        moves_memory: whether it gives a tensor another storage, or a storage another size.
        is_numbered: whether it makes a tensor or writes to one, so that plans count it.
    """

    name: str
    writes: tuple[Place, ...] = ()
    is_fresh: bool = False
    is_untold: bool = False
    training: Place | None = None
    makes: int = 1
    makes_list: bool = False
    chance: Place | None = None
    is_random: bool = False
    is_untagged: bool = False
    communicates: bool = False
    names_group: bool = False
    is_collective: bool = False
    moves_memory: bool = False
    is_numbered: bool = True

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the arguments of a call that it writes to."""
        if self.training is None or _given(self.training, args, kwargs):
            yield from (_given(place, args, kwargs) for place in self.writes)

    def forgoes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Say whether a call writes to something and gives the same without it.

        What it writes to must not decide in which dtype it computes.
        """
        if not self.is_untold:
            return False
        written, others = self.written(args, kwargs), self.without_writes(args, kwargs)
        dtypes = {each.dtype for each in tensors_in(list(written))}
        return bool(dtypes) and dtypes <= {each.dtype for each in tensors_in(others)}

    def without_writes(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call without those that it writes to."""
        places = {position for position, _ in self.writes}
        names = {name for _, name in self.writes}
        return (
            tuple(None if position in places else each for position, each in enumerate(args)),
            {name: None if name in names else each for name, each in kwargs.items()},
        )

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Say whether a call draws random numbers: attention without dropout draws none."""
        return self.is_random and (self.chance is None or bool(_given(self.chance, args, kwargs)))


def drawn_from(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | torch.device:
    """Return the generator from which a random call draws, or the device that has it."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    return torch.device(kwargs.get("device") or "cpu") if device is None else device


def fake_mode() -> Any:
    """Return the mode of fake tensors that stands now, `None` where none does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # noqa: SLF001 (no public way)


def is_numbered(operator: Any, fakes: Any) -> bool:
    """Say whether plans count a call of `operator`.

    Not counted are operators that make no storage and write to none, such as views, which not every forward
    has: autograd repeats those of fake tensors and of wrappers when a view is written to in place. Nor are
    those on fake tensors of others: by them DTensor learns once what an operator gives.

    Args:
        fakes: what `fake_mode` returned when the step or the forward began.
    """
    return facts_of(operator).is_numbered and fake_mode() is fakes


@cache
def facts_of(operator: Any) -> OperatorFacts:
    """Return what is known of `operator`."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # an operator of higher order
        return OperatorFacts(name=str(operator), makes_list=True, is_untagged=True)
    untold = _UNTOLD_WRITES.get(operator, ())
    writes = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.name in untold or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return OperatorFacts(
        name=str(operator),
        writes=tuple(writes),
        is_fresh=operator.overloadpacket not in _UNTOLD_VIEWS
        and not any(result.alias_info for result in schema.returns),
        is_untold=bool(untold),
        training=_place_of("training", schema) if untold else None,
        makes=sum(result.alias_info is None for result in schema.returns),
        makes_list=any(
            result.alias_info is None and isinstance(result.type, torch.ListType) for result in schema.returns
        ),
        chance=_place_of("dropout_p", schema),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
        is_untagged=operator.namespace not in _TAGGED,
        communicates=operator.namespace in _COMMUNICATION,
        names_group=[argument.name for argument in schema.arguments[-1:]] == ["group_name"],
        is_collective=operator.namespace == _COLLECTIVES and "wait_tensor" not in str(operator),
        moves_memory=operator.overloadpacket in _MOVES_MEMORY,
        is_numbered=operator is not _WAIT and (bool(writes) or any(map(_is_new, schema.returns))),
    )


def _is_new(result: Any) -> bool:
    """Say whether a result is a tensor, or several, on storages of their own."""
    return result.alias_info is None and "Tensor" in str(result.type)


def _place_of(name: str, schema: Any) -> Place | None:
    return next(((at, name) for at, each in enumerate(schema.arguments) if each.name == name), None)


def _given(place: Place, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)

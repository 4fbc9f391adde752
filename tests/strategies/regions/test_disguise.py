from __future__ import annotations

import copy
import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from torch import nn

from strategies.regions.blocks import Disguised
from strategies.regions.disguise import disguise, disguised


class Ours(Disguised):
    def forward(self) -> str:
        return f"around {super().forward()}"  # type: ignore[misc]


class AlsoOurs(Disguised):
    def forward(self) -> str:
        return f"around {super().forward()}"  # type: ignore[misc]


class Counting(nn.Module):
    calls = 0
    temporary = 1

    def forward(self) -> str:
        type(self).calls += 1
        return f"call {type(self).calls}"

    class Inner(nn.Module):
        """A class in a class."""

        def forward(self, mask: int = 3) -> str:
            return f"mask {mask}"


class Abstract(nn.Module, ABC):
    calls = 0

    @abstractmethod
    def forward(self) -> str: ...


class Concrete(Abstract):
    def forward(self) -> str:
        type(self).calls += 1
        return f"call {type(self).calls}"


class Registered(nn.Module):
    calls = 0
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, name: str) -> None:
        cls.names.append(name)

    def forward(self) -> str:
        type(self).calls += 1
        return f"call {type(self).calls}"


class Derived(disguised(Ours, Counting)):  # type: ignore[misc]
    """A class of the user's on top of ours."""


CLASSES = [
    pytest.param(Counting, id="a class"),
    pytest.param(Concrete, id="one with a metaclass"),
    pytest.param(Registered, id="one that asks its subclasses for a name"),
]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mixins", [(Ours,), (Ours, AlsoOurs)], ids=["once", "a disguise over a disguise"])
def test_what_forward_writes_to_its_class_is_written_there(cls: Any, mixins: tuple[Any, ...]) -> None:
    cls.calls = 3  # as a factory does
    module = cls()
    for mixin in mixins:
        disguise(module, mixin)
    assert module() == "around " * len(mixins) + "call 4"
    assert (cls.calls, type(module).__name__) == (4, cls.__name__)
    assert isinstance(module, cls)
    assert disguised(Ours, cls) is disguised(Ours, cls)


def set_new(cls: Any) -> None:
    cls.fresh = 1


def delete(cls: Any) -> None:
    del cls.temporary


@pytest.mark.parametrize(
    ("change", "name"),
    [pytest.param(set_new, "fresh", id="set"), pytest.param(delete, "temporary", id="deleted")],
)
def test_attributes_are_those_of_the_users_class(change: Callable[[Any], None], name: str) -> None:
    one, other = type("One", (Counting,), {"temporary": 2}), type("Other", (Counting,), {"temporary": 2})
    change(one)
    change(disguised(Ours, other))
    assert (name in vars(one)) == (name in vars(other))


def test_a_class_that_others_derive_keeps_its_own() -> None:
    derived: Any = type("Parametrized", (disguised(Ours, Counting),), {})
    derived.weight = 1
    assert "weight" in vars(derived)
    assert not hasattr(Counting, "weight")


def test_a_meter_finds_forward_where_it_looks() -> None:
    worn: Any = disguised(Ours, Counting)
    before, ours = Counting.forward, worn.forward
    worn.forward = lambda _self: "measured"
    assert (worn()(), Counting.forward) == ("measured", before)
    worn.forward = ours
    assert worn()().startswith("around ")


@pytest.mark.parametrize("cls", [*CLASSES, pytest.param(Counting.Inner, id="one in another")])
@pytest.mark.parametrize("mixins", [(Ours,), (Ours, AlsoOurs)], ids=["once", "a disguise over a disguise"])
def test_code_that_asks_for_the_class_finds_the_users(cls: Any, mixins: tuple[Any, ...]) -> None:
    module = cls()
    for mixin in mixins:
        disguise(module, mixin)
    worn = type(module)
    assert worn is not cls  # what cannot be kept
    assert (str(worn), worn.__name__, worn.__qualname__) == (str(cls), cls.__name__, cls.__qualname__)
    assert (worn.__module__, worn.__doc__) == (cls.__module__, cls.__doc__)
    assert isinstance(module, cls)
    assert issubclass(worn, cls)
    assert inspect.getsource(worn) == inspect.getsource(cls)
    assert inspect.getsource(module.forward) == inspect.getsource(cls.forward)
    assert inspect.signature(module.forward) == inspect.signature(cls().forward)
    assert pickle.loads(pickle.dumps(worn)) is worn
    assert type(copy.deepcopy(module)) is worn
    assert type(pickle.loads(pickle.dumps(module))) is worn


def test_what_is_derived_from_a_dynamic_class_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(Derived)) is Derived

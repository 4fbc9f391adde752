"""What a measurement puts in place of other things, and takes away again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from strategies.estimate.patched import Wrappings, original_of, wrapped


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lifted_scopes_within_one_another_are_one(depth: int) -> None:
    owner = SimpleNamespace(answer=lambda: 1)
    wrappings = Wrappings()
    wrappings.wrap(owner, "answer", lambda original: original() + 1)

    def inside(left: int) -> None:
        assert owner.answer() == 1
        if left:
            with wrappings.lifted():
                inside(left - 1)
            assert owner.answer() == 1

    with wrappings.lifted():
        inside(depth - 1)
    assert owner.answer() == 2
    wrappings.close()
    assert owner.answer() == 1


def test_what_is_wrapped_in_a_lifted_scope_waits_for_its_end() -> None:
    owner = SimpleNamespace(answer=lambda: 1)
    wrappings = Wrappings()
    with wrappings.lifted():
        wrappings.wrap(owner, "answer", lambda original: original() + 1)
        assert owner.answer() == 1
    assert owner.answer() == 2
    wrappings.close()
    assert owner.answer() == 1


def test_the_original_is_known_below_any_number_of_wrappings() -> None:
    def answer() -> int:
        return 1

    owner = SimpleNamespace(answer=answer)
    with (
        wrapped(owner, "answer", lambda original: original() + 1),
        wrapped(owner, "answer", lambda original: original() + 1),
    ):
        assert (owner.answer(), original_of(owner.answer)) == (3, answer)
    assert original_of(answer) is answer

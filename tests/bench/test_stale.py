"""The differential oracle: a slice of it finds nothing, and without guards it finds what they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from bench.stale import examine
from bench.stale_engines import ChunkEngine, Engine, NestedEngine
from strategies.chunk.running import chunked_forward, runtime
from strategies.tracing import guard

SEEDS = (3, 10)


def _wrong(engine: Engine, seeds: tuple[int, ...], chains: int) -> list[str]:
    found = [each for seed in seeds for each in examine(engine, seed, chains)]
    assert len(found) > chains * len(seeds)
    return [each.change for each in found if each.what in {"silent", "crashed"}]


@pytest.mark.parametrize("engine", [ChunkEngine(), NestedEngine()], ids=["chunk", "nested"])
def test_a_slice_is_right(engine: Engine) -> None:
    assert _wrong(engine, SEEDS[:1], 2) == []


@pytest.fixture
def _without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_shapes(cls: type[guard.Call], where: str, args: Any, kwargs: Any) -> Any:
        call = plain(where, args, kwargs)
        structure, kinds, _, switches = call.kind  # type: ignore[misc]
        return cls(kind=(structure, kinds, switches), tensors=call.tensors)

    plain: Callable[..., Any] = guard.Call.of
    monkeypatch.setattr(guard.Call, "of", classmethod(of_shapes))
    monkeypatch.setattr(guard.Guard, "fits", lambda *_: True)
    monkeypatch.setattr(guard.Guard, "taken_over", lambda own, *_: own)
    monkeypatch.setattr(chunked_forward, "refuse_unseen", lambda *_: None)
    monkeypatch.setattr(runtime, "kind_of_result", lambda _: mock.ANY)


@pytest.mark.usefixtures("_without_guards")
def test_without_guards_it_finds_what_they_are_for() -> None:
    assert len(set(_wrong(ChunkEngine(), SEEDS, 3))) > 2

"""Programs against what they stand for: random models, changed at random between calls.

Every engine runs a recorded program, or a plan, in the place of a model. Here the models of `programs` are
changed by `changes`, call after call, and what the engine gives is
compared with what the plain model gives: structure, constants and dtypes of outputs, their values, gradients
and buffers. Nested regions and planned steps must be equal bit by bit; chunks and shards add up in another
order, so that their values may differ by a share of the largest one. A refusal by name is right. Where the
plain model raises an error, the engine must raise one, or refuse. An error of the engine alone is a crash;
all else is silent.

A program is a model and a chain of one to five changes; a model has 48 of them, and its seed. A chain ends
early where something is refused or raised.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from strategies.base import StrategyError
from tests.matrix.stale.changes import CHANGES, Session, some
from tests.matrix.stale.engines import Engine, Ready

CHAINS, LENGTH = 48, 5
OUTCOMES = ("equal", "recorded anew", "refused", "both raise", "silent", "crashed")
_GOES_ON = frozenset(OUTCOMES[:2])
_WRONG = frozenset(OUTCOMES[-2:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One call after one change.

    Fields:
        engine, change: names.
        idioms: idioms of the model.
        what: one of `OUTCOMES`.
        said: message of a refusal or error, or what differs.
        seed, chain: seed of the model, and number of the chain of changes.
    """

    engine: str
    change: str
    idioms: tuple[str, ...]
    what: str
    said: str
    seed: int
    chain: int

    @property
    def is_wrong(self) -> bool:
        """Whether it is silent or a crash."""
        return self.what in _WRONG


def examine(engine: Engine, seed: int, chains: int = CHAINS) -> Iterator[Outcome]:
    """Yield what becomes of a model under its changes; nothing where the engine refuses the model."""
    ready = engine.ready(seed)
    if ready is None:
        return
    for chain in range(chains):
        yield from _chain(engine, ready, chain)


def _chain(engine: Engine, ready: Ready, chain: int) -> Iterator[Outcome]:
    plain, planned = ready.sessions()
    rng = random.Random(f"{ready.seed} {chain}")
    names = ["nothing", *some(rng, rng.randint(1, LENGTH))]
    idioms = tuple(sorted(plain.model.idioms))
    for step, name in enumerate(names):
        what, said = _compared(engine, (plain, planned), name, f"{ready.seed} {chain} {step}")
        yield Outcome(
            engine=engine.name,
            change=name,
            idioms=idioms,
            what=what,
            said=said,
            seed=ready.seed,
            chain=chain,
        )
        if what not in _GOES_ON:
            return


def _compared(engine: Engine, pair: tuple[Session, Session], change: str, seed: str) -> tuple[str, str]:
    plain, planned = pair
    expected = _expected(plain, change, seed)
    try:
        CHANGES[change](planned, random.Random(seed))
        before = engine.recorded(planned)
        actual = planned.results()
    except StrategyError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 (that is what is looked for)
        return ("both raise" if isinstance(expected, str) else "crashed"), _one_line(error)
    if isinstance(expected, str):
        return "silent", f"the plain model raises {expected}"
    bound = engine.bound(planned)
    differing = [name for name in expected if not _is_equal(expected[name], actual.get(name), bound)]
    if differing:
        return "silent", ", ".join(differing)
    return ("recorded anew" if engine.recorded(planned) > before else "equal"), ""


def _expected(plain: Session, change: str, seed: str) -> dict[str, Any] | str:
    """Return what the plain model gives, or the error that it raises."""
    try:
        CHANGES[change](plain, random.Random(seed))
        return plain.results()
    except Exception as error:  # noqa: BLE001 (whatever it is, the engine must have one too)
        return _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_equal(one: Any, other: Any, bound: float) -> bool:
    leaves, structure = tree_flatten(one)
    others, its_own = tree_flatten(other)
    return structure == its_own and all(_is_close(*pair, bound) for pair in zip(leaves, others, strict=True))


def _is_close(one: Any, other: Any, bound: float) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        return False
    if not (one.is_floating_point() or one.is_complex()) or not bound:
        return one.equal(other)
    largest = max(float(one.detach().abs().max()), 1.0) if one.numel() else 1.0
    return one.allclose(other, rtol=0.0, atol=bound * largest, equal_nan=True)


def until_silent() -> Any:
    """Return `examine` that yields nothing after the first outcome that is silent."""
    has_ended = False

    def some_of(engine: Engine, seed: int) -> Iterator[Outcome]:
        nonlocal has_ended
        for each in () if has_ended else examine(engine, seed):
            yield each
            has_ended = each.what == "silent"
            if has_ended:
                return

    return some_of

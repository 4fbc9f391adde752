"""Programs against what they stand for: random models, changed at random between calls.

Every engine runs a recorded program, or a plan, in the place of a model. Here models of
`bench.stale_programs` are changed by `bench.stale_changes`, call after call, and what the engine gives is
compared with what the plain model gives: structure, constants and dtypes of outputs, their values, gradients
and buffers. Nested regions must be equal bit by bit; chunks and shards add up in another order, so that
their values may differ by a share of the largest one. A refusal by name is right; another
error, where the plain model has none, is a crash; all else is silent.

    python -m bench.stale --programs 100 --seed 0 --engines nested chunk shard

A program has six chains of changes; a chain ends where something is refused. Every silent difference, and
every crash, prints the line that repeats its program.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_flatten

from bench.output import parser, publish
from bench.stale_changes import CHANGES, Session, some
from bench.stale_engines import ENGINES, Engine, Ready
from bench.table import Column, table_of
from strategies.errors import StrategyError

CHAINS, LENGTH = 6, 5
OUTCOMES = ("equal", "recorded anew", "refused", "silent", "crashed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One call after one change.

    Fields:
        engine, change: names.
        idioms: idioms of the program.
        what: one of `OUTCOMES`.
        said: message of a refusal or error, or what differs.
        seed: seed of the program.
    """

    engine: str
    change: str
    idioms: tuple[str, ...]
    what: str
    said: str
    seed: int


def examine(engine: Engine, seed: int, chains: int = CHAINS) -> Iterator[Outcome]:
    """Yield what becomes of a program under its changes; nothing where the engine refuses the program."""
    ready = engine.ready(seed)
    if ready is None:
        return
    for chain in range(chains):
        yield from _chain(engine, ready, seed, chain)


def _chain(engine: Engine, ready: Ready, seed: int, chain: int) -> Iterator[Outcome]:
    plain, planned = ready.sessions()
    names = ["nothing", *some(random.Random(f"{seed} {chain}"), LENGTH)]  # noqa: S311 (no secrets)
    for step, name in enumerate(names):
        try:
            CHANGES[name](plain, random.Random(f"{seed} {chain} {step}"))  # noqa: S311
            expected = plain.results()
        except Exception:  # noqa: BLE001 (what the plain model cannot do, nobody has to)
            return
        what, said = _compared(engine, planned, expected, name, f"{seed} {chain} {step}")
        idioms = tuple(sorted(plain.model.idioms))
        yield Outcome(engine=engine.name, change=name, idioms=idioms, what=what, said=said, seed=seed)
        if what not in {"equal", "recorded anew"}:
            return


def _compared(
    engine: Engine, planned: Session, expected: dict[str, Any], change: str, seed: str
) -> tuple[str, str]:
    try:
        CHANGES[change](planned, random.Random(seed))  # noqa: S311
        before = engine.recorded(planned)
        actual = planned.results()
    except StrategyError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 (that is what is looked for)
        return "crashed", f"{type(error).__name__}: {error}".partition("\n")[0]
    bound = engine.bound(planned)
    differing = [name for name in expected if not _is_equal(expected[name], actual.get(name), bound)]
    if differing:
        return "silent", ", ".join(differing)
    return ("recorded anew" if engine.recorded(planned) > before else "equal"), ""


def _is_equal(one: Any, other: Any, bound: float) -> bool:
    leaves, structure = tree_flatten(one)
    others, its_own = tree_flatten(other)
    return structure == its_own and all(_is_close(*pair, bound) for pair in zip(leaves, others, strict=True))


def _is_close(one: Any, other: Any, bound: float) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype or one.requires_grad != other.requires_grad:
        return False
    if not one.is_floating_point() or not bound:
        return torch.equal(one, other)
    largest = max(float(one.detach().abs().max()), 1.0) if one.numel() else 1.0
    return torch.allclose(one, other, rtol=0.0, atol=bound * largest, equal_nan=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where something was silent or crashed."""
    options = _options(arguments)
    torch.set_num_threads(1)
    found: list[Outcome] = []
    rates = {}
    for name in options.engines:
        begin = time.process_time()
        engine = ENGINES[name]()
        with redirect_stderr(StringIO()):
            outcomes = engine.outcomes(range(options.seed, options.seed + options.programs), examine)
        rates[name] = len(outcomes) / (time.process_time() - begin)
        found += outcomes
    for each in found:
        if each.what in {"silent", "crashed"}:
            again = f"python -m bench.stale --programs 1 --seed {each.seed} --engines {each.engine}"
            sys.stdout.write(f"{each.what}: {each.change}: {each.said}\n    {again}\n")
    publish(_table(found), options.out, protocol=_protocol(options), results=_results(found, rates))
    return int(any(each.what in {"silent", "crashed"} for each in found))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "stale")
    made.add_argument("--programs", type=int, default=100, help="programs an engine")
    made.add_argument("--seed", type=int, default=0, help="seed of the first program")
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="what is examined")
    return made.parse_args(arguments)


def _protocol(options: argparse.Namespace) -> dict[str, Any]:
    bounds = {name: {str(key): share for key, share in each.bounds.items()} for name, each in ENGINES.items()}
    return {
        "programs": options.programs,
        "seed": options.seed,
        "chains": CHAINS,
        "changes_a_chain": LENGTH,
        "bounds": {name: bounds[name] for name in options.engines},
    }


def _results(found: list[Outcome], rates: dict[str, float]) -> dict[str, Any]:
    return {
        "calls": _counts(found),
        "calls_a_cpu_second": {name: round(rate, 1) for name, rate in rates.items()},
        "wrong": [asdict(each) for each in found if each.what in {"silent", "crashed"}],
    }


def _counts(found: list[Outcome]) -> list[dict[str, Any]]:
    """Return rows of an engine each, of an engine and change, and of an engine and idiom."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    seeds: dict[tuple[str, str, str], set[int]] = {}
    for each in found:
        idioms = [(each.engine, "idiom", idiom) for idiom in each.idioms]
        for key in [(each.engine, "all", "all"), (each.engine, "change", each.change), *idioms]:
            rows.setdefault(key, Counter())[each.what] += 1
            seeds.setdefault(key, set()).add(each.seed)
    return [
        {"engine": engine, "by": by, "of": of, "programs": len(seeds[engine, by, of])}
        | {"calls": counts.total(), **{what: counts[what] for what in OUTCOMES}}
        for (engine, by, of), counts in sorted(rows.items())
    ]


def _table(found: list[Outcome]) -> Table:
    columns: dict[str, Column] = {"engine": lambda row: row["engine"], "by": lambda row: row["by"]}
    columns["of"] = lambda row: row["of"]
    for name in ("programs", "calls", *OUTCOMES):
        columns[name] = partial(_cell, name)
    return table_of(_counts(found), columns, title="Calls after a change, compared with the plain model")


def _cell(name: str, row: dict[str, Any]) -> str:
    return f"{row[name]:,}"


if __name__ == "__main__":
    sys.exit(main())

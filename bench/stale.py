"""Programs against what they stand for: random models, changed at random between calls.

Every engine runs a recorded program, or a plan, in the place of a model. Here models of
`bench.stale_programs` are changed by `bench.stale_changes`, call after call, and what the engine gives is
compared with what the plain model gives: structure, constants and dtypes of outputs, their values, gradients
and buffers. Nested regions and planned steps must be equal bit by bit; chunks and shards add up in another
order, so that their values may differ by a share of the largest one. A refusal by name is right. Where the
plain model raises an error, the engine must raise one, or refuse. An error of the engine alone is a crash;
all else is silent.

    python -m bench.stale --programs 480 --seed 0 --engines nested budget chunk shard --jobs 2
    python -m bench.stale --add outputs/a.json outputs/b.json
    python -m bench.stale --without aliasing hooks

A program is a model and a chain of one to five changes; a model has 48 of them, and its seed. A chain ends
early where something is refused or raised. What is silent or crashes prints the line that repeats its model.
`--add` adds up the results of portions, which have other seeds. `--without` switches a guard off, and counts
the programs until something is silent: what no guard sees must be found.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, pairwise
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_flatten

from bench.output import parser, publish
from bench.stale_changes import CHANGES, Session, some
from bench.stale_engines import ENGINES, Engine, Ready
from bench.stale_guards import GUARDS
from bench.table import Column, table_of
from strategies.base import StrategyError

CHAINS, LENGTH = 48, 5
OUTCOMES = ("equal", "recorded anew", "refused", "both raise", "silent", "crashed")
_GOES_ON = frozenset(OUTCOMES[:2])
_WRONG = frozenset(OUTCOMES[-2:])
_COUNTS = ("models", "programs", "calls", *OUTCOMES)
_KEY = itemgetter("engine", "by", "of")


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
    rng = random.Random(f"{ready.seed} {chain}")  # noqa: S311 (no secrets)
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
        CHANGES[change](planned, random.Random(seed))  # noqa: S311 (no secrets)
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
        CHANGES[change](plain, random.Random(seed))  # noqa: S311 (no secrets)
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


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where something was silent or crashed, or a guard's absence went unnoticed."""
    options = _options(arguments)
    if options.without:
        return _without(options)
    content = _sum(options.add) if options.add else _portion(options)
    protocol, results = content["protocol"], content["results"]
    for each in results["wrong"]:
        again = f"python -m bench.stale --programs 1 --seed {each['seed']} --engines {each['engine']}"
        where = f"{each['change']}, chain {each['chain']}"
        sys.stdout.write(f"{each['what']}: {where}: {each['said']}\n    {again}\n")
    publish(_table(results), options.out, protocol=protocol, results=results)
    return int(bool(results["wrong"]))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "stale")
    made.add_argument("--programs", type=int, default=480, help=f"programs an engine; {CHAINS} a model")
    made.add_argument("--seed", type=int, default=0, help="seed of the first model")
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="what is examined")
    made.add_argument("--jobs", type=int, default=1, help="processes; shards have two ranks in each")
    made.add_argument("--add", nargs="+", type=Path, help="results of portions to add up, instead of a run")
    made.add_argument("--without", nargs="+", choices=GUARDS, help="guards to switch off, one after another")
    return made.parse_args(arguments)


def _portion(options: argparse.Namespace) -> dict[str, Any]:
    """Return protocol and results of a run."""
    seeds = range(options.seed, options.seed + ceil(options.programs / CHAINS))
    rows: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    cpu_s: dict[str, float] = {}
    for name in options.engines:
        found, seconds = _found(name, seeds, options.jobs)
        rows += _counts(found)
        wrong += [asdict(each) for each in found if each.is_wrong]
        cpu_s[name] = round(seconds, 1)
    protocol = {
        "chains_a_model": CHAINS,
        "most_changes_a_chain": LENGTH,
        "bounds": {name: {str(k): v for k, v in each.bounds.items()} for name, each in ENGINES.items()},
        "seeds": {name: [[seeds.start, seeds.stop]] for name in options.engines},
    }
    return {"protocol": protocol, "results": {"rows": rows, "cpu_s": cpu_s, "wrong": wrong}}


def _found(name: str, seeds: range, jobs: int) -> tuple[list[Outcome], float]:
    """Return all outcomes of an engine, and the CPU time of that in seconds."""
    if jobs == 1:
        return _run(name, seeds)
    parts = [seeds[job::jobs] for job in range(jobs)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(partial(_run, name), parts))
    return [each for part, _ in found for each in part], sum(seconds for _, seconds in found)


def _run(name: str, seeds: range) -> tuple[list[Outcome], float]:
    return ENGINES[name]().outcomes(seeds, examine)


def _sum(paths: list[Path]) -> dict[str, Any]:
    """Return protocol and results of portions, added up.

    Raises:
        SystemExit: they were not made alike, or have seeds in common.
    """
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    seeds: dict[str, list[list[int]]] = {}
    protocols = [dict(each["protocol"]) for each in contents]
    for protocol in protocols:
        for name, ranges in protocol.pop("seeds").items():
            seeds[name] = sorted(seeds.get(name, []) + ranges)
    if any(each != protocols[0] for each in protocols):
        raise SystemExit("stale: the portions have different protocols; make them alike")
    for name, ranges in seeds.items():
        if any(one[1] > other[0] for one, other in pairwise(ranges)):
            raise SystemExit(f"stale: portions of {name!r} have seeds in common; use each once")
    parts = [each["results"] for each in contents]
    cpu_s: Counter[str] = Counter()
    for part in parts:
        cpu_s.update(part["cpu_s"])
    results = {
        "rows": _added(row for part in parts for row in part["rows"]),
        "cpu_s": {name: round(seconds, 1) for name, seconds in cpu_s.items()},
        "wrong": [each for part in parts for each in part["wrong"]],
    }
    return {"protocol": protocols[0] | {"seeds": seeds}, "results": results}


def _added(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of the rows with the same engine, `by` and `of`."""
    return [
        dict(zip(("engine", "by", "of"), key, strict=True)) | _total(list(group))
        for key, group in groupby(sorted(rows, key=_KEY), key=_KEY)
    ]


def _total(rows: list[Mapping[str, Any]]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in _COUNTS}


def _counts(found: list[Outcome]) -> list[dict[str, Any]]:
    """Return rows of an engine each, of an engine and change, and of an engine and idiom."""
    rows: dict[tuple[str, str, str], list[Outcome]] = {}
    for each in found:
        idioms = [(each.engine, "idiom", idiom) for idiom in each.idioms]
        for key in [(each.engine, "all", "all"), (each.engine, "change", each.change), *idioms]:
            rows.setdefault(key, []).append(each)
    return [
        {"engine": engine, "by": by, "of": of} | _counted(outcomes)
        for (engine, by, of), outcomes in sorted(rows.items())
    ]


def _counted(outcomes: list[Outcome]) -> dict[str, int]:
    counts = Counter(each.what for each in outcomes)
    models = {each.seed for each in outcomes}
    programs = {(each.seed, each.chain) for each in outcomes}
    numbers = {"models": len(models), "programs": len(programs), "calls": len(outcomes)}
    return numbers | {what: counts[what] for what in OUTCOMES}


def _table(results: Mapping[str, Any]) -> Table:
    columns: dict[str, Column] = {name: partial(_cell, name) for name in ("engine", "by", "of", *_COUNTS)}
    calls = {row["engine"]: row["calls"] for row in results["rows"] if row["by"] == "all"}
    rates = (f"{name} {calls.get(name, 0) / (s or 1):.0f}" for name, s in results["cpu_s"].items())
    return table_of(
        results["rows"],
        columns,
        title="Calls after a change, compared with the plain model",
        caption=f"calls in a CPU-second: {', '.join(rates)}",
    )


def _cell(name: str, row: Mapping[str, Any]) -> str:
    return f"{row[name]:,}" if name in _COUNTS else str(row[name])


def _without(options: argparse.Namespace) -> int:
    """Switch off one guard after another; 1 where the oracle does not notice."""
    rows = [_first_wrong(name, options) for name in options.without]
    columns: dict[str, Column] = {name: partial(_cell, name) for name in ("guard", "engine")}
    columns |= {name: partial(_cell, name) for name in ("programs", "calls")}
    columns |= {name: partial(_cell, name) for name in ("what", "change", "said")}
    table = table_of(rows, columns, title="Programs until a guard that is switched off is missed")
    publish(table, options.out, protocol={"seed": options.seed, "programs": options.programs}, results=rows)
    return int(any(row["what"] != "silent" for row in rows))


def _first_wrong(name: str, options: argparse.Namespace) -> dict[str, Any]:
    engine = ENGINES["chunk"]()
    seeds = range(options.seed, options.seed + ceil(options.programs / CHAINS))
    with GUARDS[name]():
        found, _ = engine.outcomes(seeds, until_silent())
    last = found[-1]
    programs = len({(each.seed, each.chain) for each in found})
    said = {"what": last.what, "change": last.change, "said": last.said}
    return {"guard": name, "engine": engine.name, "programs": programs, "calls": len(found)} | said


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


if __name__ == "__main__":
    sys.exit(main())

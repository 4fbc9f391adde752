"""Write docs/legality.md from the kept results of the legality matrix.

python -m docs.tools.legality
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.tools.pipelines import places_table
from docs.tools.readme import markdown
from tests.matrix.facts import MESHES
from tests.matrix.legality import JUDGEMENTS, KNOWN_BAD, Cell, cells, judgement, known_bad, unexpected

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "docs" / "results"
PAGE = _ROOT / "docs" / "legality.md"

_HEAD = """\
# Legality

Where each variant of activation checkpointing may stand, and whether it trains as the plain model there.
Written by `python -m docs.tools.legality` from {links},
measured at these commits. The first command runs cells of variants anew and writes such a file; they are rows
of a test too, which resumes:

```console
$ python -m tests.matrix.legality_rows modules megatron tiles
$ python -m pytest -m '' tests/matrix/test_legality.py -k 'none-single'
```

A cell is a variant with a mesh, `wrap_order`, `compile`, `compile_order`, `dtype`, dropout, `ac.early_stop`
and `ac.preserve_rng_state`. Options that a variant does not have do not make two cells of one. Every cell is

* *neutral*: bit for bit as its twin, inside kernels of Inductor
  [within a tolerance](compile.md#what-is-compared); a compiled twin is itself proven against the uncompiled
  model, under Inductor within a tolerance;
* *refused*, with the reason;
* *known bad*: it differs from its twin as an entry of the [gallery](gallery/README.md) does;
* *unexpected*: something else, or known bad and yet right. The test then fails.
"""


_STEPS = """\
## Pipelines and micro-batches

Four micro-batches of a `llama` with dropout, under each schedule of a [pipeline](pipelines.md) of two ranks,
against the twin and against one process that is not cut. `python -m tests.matrix.pipeline_rows` runs these
cells; `tests/matrix/test_steps_in_parts.py` runs them again, and compares each with this table. Without a
pipeline every eager variant is neutral on `single`, `tp2`, and `ddp2`, `shard2` and FSDP1 with
`mesh.sync=each` and `last`, but for `ac=budget` with `last` under FSDP, which is refused:
`tests/matrix/test_microbatches.py`.
"""


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


def page() -> str:
    """Return the page of the kept result, with the cells that ran once more after a mend."""
    return f"{_page()}\n{_STEPS}\n{places_table()}\n"


def _page() -> str:
    (path,) = _RESULTS.glob("legality-cpu-*.json")
    later = [
        each for kind in ("again", "added") for each in sorted(_RESULTS.glob(f"legality_{kind}-cpu-*.json"))
    ]
    return page_of([path, *later], cells())


def page_of(paths: Sequence[Path], everything: Iterable[Cell]) -> str:
    """Return the page of kept results.

    Args:
        paths: the matrix, then cells that ran once more or were added; the last ending of a cell counts, and
            the last number of cells.
        everything: all cells.
    """
    content, *later = [json.loads(path.read_text("utf-8")) for path in paths]
    for each in (content, *later):
        each["results"]["ran"] = dict(_endings(each["results"]["ran"]))
    results = content["results"]
    measured, again = len(results["ran"]), []
    for each in later:
        again.append(_again(each, results["ran"]))
        results["ran"] |= each["results"]["ran"]
        results |= {name: each["results"][name] for name in ("refused", "legal", "planned")}
    links = " and ".join(f"[{path.name}](results/{path.name})" for path in paths)
    by_words = {cell.words: cell for cell in everything}
    ran = [(by_words[words], ending) for words, ending in results["ran"].items()]
    environment = content["environment"]
    torch = environment["torch"].partition("+")[0]
    machine = f"torch {torch}, Python {environment['python']}, {environment['device']}"
    blocks = [
        _HEAD.format(links=links),
        f"## Counts\n\n{' '.join([f'{machine}.', *again])}\n\n{_counts(content, ran, measured)}\n",
        f"## Cells that ran\n\n{_by_place(ran)}\n",
        *_unmeasured(by_words.values(), ran),
        f"## Known bad\n\n{_known_bad(ran)}\n",
        f"## Refused before anything runs\n\n{_refused(results)}\n",
        f"## Unexpected\n\n{_unexpected(unexpected(results['ran'], by_words))}\n",
    ]
    return "\n".join(blocks)


def _endings(tree: Mapping[str, Any], words: str = "") -> Iterator[tuple[str, str]]:
    """Yield cells with their endings from a tree: a level has the words of one option that end alike."""
    for alike, below in tree.items():
        for word in alike.split("|"):
            path = f"{words} {word}".lstrip()
            if isinstance(below, str):
                yield path, below
            else:
                yield from _endings(below, path)


def _again(content: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Return what a file says whose cells were measured later than those that are known."""
    ran, commit = content["results"]["ran"], content["environment"]["commit"][:8]
    if ran.keys() <= known.keys():
        return f"{len(ran)} cells ran once more at {commit}, after a mend; that ending counts."
    return f"{len(ran)} cells were added at {commit}."


def _counts(content: Mapping[str, Any], ran: list[tuple[Cell, str]], measured: int) -> str:
    """Return the numbers of cells; the first `measured` of those that ran are the ones with a wall time."""
    results, protocol = content["results"], content["protocol"]
    found = Counter(judgement(cell, ending) for cell, ending in ran)
    refused = sum(results["refused"].values())
    rows = [
        ["all", f"{refused + results['legal']:,}"],
        ["refused before anything runs", f"{refused:,}"],
        ["legal", f"{results['legal']:,}"],
        [
            f"to run: {protocol['uncompiled']} that is not compiled; of the others {protocol['compiled']}",
            f"{results['planned']:,}",
        ],
        ["of these not run yet", f"{results['planned'] - len(ran):,}"],
        ["ran", f"{len(ran):,}"],
        *(
            [f"of these {judged}", f"{found[judged]:,}"]
            for judged in ("neutral", "known bad", "refused", "unexpected")
        ),
    ]
    times = ", ".join(
        f"{seconds / _count(ran[:measured], compiler):.1f} s with `compile={compiler}`"
        for compiler, seconds in results["seconds"].items()
    )
    return f"{markdown(('cells', 'count'), rows)}\n\nWall time of a cell, beside other work: {times}."


def _count(ran: list[tuple[Cell, str]], compiler: str) -> int:
    return sum(cell.compile == compiler for cell, _ in ran)


def _by_place(ran: list[tuple[Cell, str]]) -> str:
    """Return judgements by variant and compiler, a column a mesh."""
    meshes = [mesh for mesh in MESHES if any(cell.mesh == mesh for cell, _ in ran)]
    found = Counter((*_row(cell), cell.mesh, judgement(cell, ending)) for cell, ending in ran)
    rows = [
        [
            f"`ac={variant}`",
            _compiled(compiler, order),
            *(
                ", ".join(
                    f"{count} {judged}"
                    for judged in JUDGEMENTS
                    if (count := found[variant, compiler, order, mesh, judged])
                )
                or "-"
                for mesh in meshes
            ),
        ]
        for variant, compiler, order in sorted({_row(cell) for cell, _ in ran}, key=str)
    ]
    return markdown(("variant", "compile", *(f"`{mesh}`" for mesh in meshes)), rows)


def _unmeasured(everything: Iterable[Cell], ran: list[tuple[Cell, str]]) -> list[str]:
    """Return a sentence about variants that the test has and no kept file; none where there are no such."""
    measured = {_row(cell)[0] for cell, _ in ran}
    names = sorted({_row(cell)[0] for cell in everything} - measured)
    listed = ", ".join(f"`ac={name}`" for name in names)
    return [f"The test has cells of {listed} too: what is kept is older.\n"] if names else []


def _row(cell: Cell) -> tuple[str, str, str | None]:
    variant = cell.variant if cell.chunk is None else f"{cell.variant} chunk={cell.chunk}"
    return variant, cell.compile, cell.compile_order


def _compiled(compiler: str, order: str | None) -> str:
    return f"`{compiler}`" if order is None else f"`{compiler}`, `{order}`"


def _known_bad(ran: list[tuple[Cell, str]]) -> str:
    wrong = Counter(
        rule for cell, ending in ran if judgement(cell, ending) == "known bad" and (rule := known_bad(cell))
    )
    rows = [
        [
            f"[{rule.number}](gallery/README.md)",
            rule.name,
            ", ".join(
                f"`{name}`"
                for name in dict.fromkeys(cell.variant for cell, _ in ran if known_bad(cell) is rule)
            ),
            f"{wrong[rule]:,}",
            rule.link,
        ]
        for rule in KNOWN_BAD
    ]
    return markdown(("gallery", "what is wrong", "variants", "cells", "upstream"), rows)


def _refused(results: Mapping[str, Any]) -> str:
    refused = sorted(results["refused"].items(), key=lambda each: (-each[1], each[0]))
    return markdown(("reason", "cells"), [[reason, f"{count:,}"] for reason, count in refused])


def _unexpected(problems: Mapping[str, str]) -> str:
    return "\n".join(f"* `{words}`: {problem}" for words, problem in problems.items()) or "Nothing."


if __name__ == "__main__":
    sys.exit(main())

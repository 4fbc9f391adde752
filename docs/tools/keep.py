"""Keep results of benchmarks in the documentation: `python -m docs.tools.keep outputs/bench/budget.json`.

A kept file is called after its benchmark, its device and its commit, and holds no space between its values.
Fractions of a benchmark have six digits; records stay as they are. What was measured with changes that are in
no commit is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[2] / "docs" / "results"
_COMMIT_DIGITS = 8
_FRACTION_DIGITS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep the files that are named; return 2 where one may not be kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="what a benchmark wrote, or a list of records")
    for file in parser.parse_args(arguments).files:
        content = json.loads(file.read_text("utf-8"))
        try:
            path = KEPT / kept_name(file.stem, content)
        except ValueError as error:
            sys.stderr.write(f"{file}: {error}\n")
            return 2
        path.write_text(compact(content), encoding="utf-8")
        print(path)
    return 0


def kept_name(stem: str, content: Any) -> str:
    """Return the name of a kept file, such as `budget-cpu-d81415c8.json`.

    Raises:
        ValueError: it was measured with changes that are in no commit, or at several commits.
    """
    commit, *others = commits(content)
    if others:
        raise ValueError(f"measured at {len(others) + 1} commits")
    if not commit or commit.endswith("-dirty"):
        raise ValueError(f"measured at {commit or 'no commit'}; commit first, then measure")
    device = "cpu" if _environments(content)[0].get("driver") is None else "cuda"
    return f"{stem.partition('-')[0]}-{device}-{commit[:_COMMIT_DIGITS]}.json"


def commits(content: Any) -> list[str]:
    """Return the commits that a kept file was measured at, each once."""
    return list(dict.fromkeys(str(each.get("commit") or "") for each in _environments(content)))


def compact(content: Any) -> str:
    """Return the text of a kept file."""
    kept = content if isinstance(content, list) else _rounded(content)
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{_FRACTION_DIGITS}g}") if isinstance(value, float) else value


def _environments(content: Any) -> list[dict[str, Any]]:
    """Return the environment of a benchmark's file, or of each record of a list."""
    each = content if isinstance(content, list) else [content]
    return [one.get("environment") or {} for one in each]


if __name__ == "__main__":
    sys.exit(main())

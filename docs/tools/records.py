"""Gather the records of a sweep into one JSON file.

python -m docs.tools.records outputs/demo --out demo.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.records.files import SHARED, write_atomically
from harness.records.store import RECORD


def main() -> int:
    """Write the list of records, in order of their trial ids; return 1 if there are none."""
    arguments = _arguments()
    paths = sorted(arguments.sweep.glob(f"*/{RECORD}"))
    found = [json.loads(path.read_text("utf-8")) for path in paths]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out, json.dumps(found, indent=1) + "\n", mode=SHARED)
    print(arguments.out)
    return int(not found)


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m docs.tools.records", description=__doc__)
    made.add_argument("sweep", type=Path, help="folder of a sweep")
    made.add_argument("--out", type=Path, required=True, help="the JSON file")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""What 40 points of the parity matrix measure: to show that a change of the code changed none of it.

Trial ids, verdicts, bytes, FLOPs, recomputed operators and collectives are exact, so they are compared for
equality, with those of another checkout that the same command measures.

    python -m bench.behaviour --before ../other_checkout
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.output import parser, publish
from bench.table import Column, table_of

_SIZES = (
    "model.n_layers=2",
    "model.width=32",
    "model.hidden_width=64",
    "model.dropout=0.1",
    "batch_size=4",
    "protocol=parity",
    "tracker=none",
)
_TOKENS = ("data=synthetic", "sequence_length=16")
SWEEPS = (
    ("model=gpt_nano", "mesh=single,shard2,tp2", "ac=glob(*)", *_TOKENS),
    ("model=llama_nano,moe_nano", "mesh=ddp2", "ac=none,full,selective_op,nested,offload", *_TOKENS),
    ("model=mlp", "mesh=hsdp2x2", "ac=full,nested,offload,selective_layer", *_TOKENS),
    ("model=gpt_nano", "mesh=single", "ac=none,full", "chunk=budget", "chunk.fraction=0.7", *_TOKENS),
    ("model=vit_nano", "mesh=single,ddp2", "chunk=minimum"),
    ("model=llama_nano", "mesh=tp2", "ac=none,full", "shard=megatron,cheapest", *_TOKENS),
)
"""40 points: AC, chunks and sharding on one rank, two and four."""

_MEASURED = {
    "memory": ("saved_bytes", "peak_bytes", "activation_peak_bytes", "peak_phase", "peak_module"),
    "work": ("forward_flops", "backward_flops", "recomputed_flops", "recomputed_ops", "collectives", "calls"),
    "parity": ("level", "steps"),
}


def main() -> int:
    """Measure here and in another checkout, print both, return 1 where they differ."""
    made = parser(__doc__, "behaviour")
    made.add_argument("--before", type=Path, help="another checkout, or the JSON file of an earlier run")
    arguments = made.parse_args()
    after = _measured(Path(__file__).parents[1])
    before = after
    if arguments.before is not None and arguments.before.is_dir():
        before = _measured(arguments.before.resolve())
    elif arguments.before is not None:
        before = json.loads(arguments.before.read_text(encoding="utf-8"))["results"]["after"]
    publish(
        _table(before, after),
        arguments.out,
        protocol={"sizes": _SIZES, "sweeps": SWEEPS},
        results={"before": before, "after": after},
    )
    known = before.keys() | after.keys()
    different = sorted(key for key in known if before.get(key) != after.get(key))
    for key in different:
        print(f"{key}: {before.get(key)} before, {after.get(key)} after")
    print(f"equal: {len(known) - len(different)} of {len(known)}")
    return int(bool(different))


def _measured(checkout: Path) -> dict[str, Any]:
    """Return what the points measure in `checkout`, by trial id."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for sweep in SWEEPS:
            sizes = [size for size in _SIZES if "vit_nano" not in sweep[0] or "hidden" not in size]
            command = [sys.executable, "-m", "harness", "-m", f"outputs_dir={folder}", "name=behaviour"]
            environment = os.environ | {"PYTHONPATH": str(checkout)}
            subprocess.run([*command, *sizes, *sweep], cwd=checkout, env=environment, check=True)
        for path in sorted(Path(folder).glob("behaviour/*/record.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            found[record["trial_id"]] = _facts(record)
    return found


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    chosen = {
        group: record["experiment"][group]["name"] for group in ("model", "mesh", "ac", "chunk", "shard")
    }
    measured = {
        f"{part}.{name}": (record[part] or {}).get(name)
        for part, names in _MEASURED.items()
        for name in names
    }
    return {**chosen, "status": record["status"], "verdict": record["verdict"], **measured}


def _table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    def point(key: str) -> str:
        return " ".join(str(after[key][group]) for group in ("model", "mesh", "ac", "chunk", "shard"))

    def change(name: str) -> Column:
        def text(key: str) -> str:
            now, earlier = after[key][name], before.get(key, {}).get(name)
            return str(now) if now == earlier else f"{earlier} -> {now}"

        return text

    shown = ("memory.saved_bytes", "memory.peak_bytes", "work.recomputed_flops", "verdict")
    columns: dict[str, Column] = {"trial_id": str, "point": point, **{name: change(name) for name in shown}}
    return table_of(after, columns, title="Before and after: equal where one number stands")


if __name__ == "__main__":
    sys.exit(main())

"""`model=hf` builds GPT-2 without naming a dropout, under a checkpoint that loses random state.

Every dropout field of the configuration was set to 0.0, where the class has 0.1, and no record said so.
"""

from __future__ import annotations

from tests.gallery.outside._commands import acbench, records

BEFORE = "neutral, attn_pdrop 0.0"
RIGHT = "differs, attn_pdrop 0.1"


def answer() -> str:
    """Return the verdict, and the dropout of attention that the record admits to."""
    acbench(
        "model=hf", "model.overrides={n_embd: 32, n_head: 2}", "model.n_layers=1", "ac=full", "batch_size=2",
        "sequence_length=16", "ac.preserve_rng_state=false", "protocol=parity", "tracker=none", "name=case",
    )  # fmt: skip
    (record,) = records("case")
    replaced = record["trained"].get("replaced", ["attn_pdrop: 0.1 -> 0.0"])
    is_replaced = any(sentence.startswith("attn_pdrop") for sentence in replaced)
    return f"{record['verdict']}, attn_pdrop {0.0 if is_replaced else 0.1}"

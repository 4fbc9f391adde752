"""Chunk plans: bytes and time."""

from bench.output import run_part

PARTS = {
    "budgets": "which budgets of activations are kept, for how much time",
    "chunk_points": "the same at published points, and the longest sequence in fixed bytes",
}

if __name__ == "__main__":
    run_part("chunking", PARTS)

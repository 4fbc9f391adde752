"""A short step as it stands next to a record."""

from __future__ import annotations

from harness.records.step_trace import StepTrace, TracedChange, TracedOperator, TracedStorage

MM = "aten.mm.default"
STEP = StepTrace(
    rank=0,
    start=((0, 100),),
    storages=(
        TracedStorage("parameters", "", "", "", "5x5", "float32", on_host=False),
        TracedStorage("saved", MM, "layers.0.up", "model.py:7", "2x5", "float32", on_host=False),
        TracedStorage("temporary", "aten._to_copy.default", "layers.0", "", "2", "float32", on_host=True),
        TracedStorage("gradients", MM, "layers.0.up", "model.py:7", "5x3", "float32", on_host=False),
    ),
    changes=(
        TracedChange(1, 40, 1),
        TracedChange(2, 8, 2),
        TracedChange(1, -40, 3),
        TracedChange(3, 60, 4),
        TracedChange(0, -100, 5),  # a parameter of FSDP goes
    ),
    operators=(
        TracedOperator(MM, "forward", "layers.0.up", "model.py:7", "", is_recomputed=False, flops=50),
        TracedOperator("aten._to_copy.default", "forward", "layers.0", "", "", is_recomputed=False, flops=0),
        TracedOperator(
            MM, "backward", "layers.0.up", "model.py:7", "MmBackward0", is_recomputed=True, flops=50
        ),
        TracedOperator(
            MM, "backward", "layers.0.up", "model.py:7", "MmBackward0", is_recomputed=False, flops=50
        ),
        TracedOperator("aten.add_.Tensor", "optimizer", "(optimizer)", "", "", is_recomputed=False, flops=0),
    ),
)

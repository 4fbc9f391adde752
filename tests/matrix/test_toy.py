"""torchtitan's table of backward FLOPs and saved memory, by the meters of trials and by two small ones.

The rows of torchtitan are `none`, `full` and the preset with early stop off; the others follow from the same
definitions. The state of the CPU's generator, which every recomputing region keeps and a CUDA meter does not
see, is saved beside what the table says.
"""

from __future__ import annotations

import pytest
import torch

from bench.trials import experiments
from harness.measure.step import instrument
from harness.trial.assemble import assemble
from tests.matrix.models import Toy
from tests.strategies.meters import measure

UNIT_FLOPS = 2 * 512**3  # one square product
UNIT_BYTES = 512 * 512 * 4  # one square activation: a MiB
_MODEL = ("model=python", "model.factory=tests.matrix.models:toy", "model.layers_fqn=layers")
_PRESET = "ac=selective_op ac.save_ops=torchtitan"
_ALL_MATMULS = "ac=selective_op ac.save_ops=[matmul]"
_EVERY_THIRD = f"{_ALL_MATMULS} ac.matmul_recompute_every=3"
# overrides, backward FLOPs in units, saved activations in units
CASES = {
    "none keeps two products": ("ac=none", 8, 2),
    "the preset recomputes every second": (f"{_PRESET} ac.early_stop=false", 9, 3),
    "the preset needs the second, so it stops there": (f"{_PRESET} ac.early_stop=true", 9, 3),
    "all matmuls saved, none recomputed": (f"{_ALL_MATMULS} ac.early_stop=false", 8, 4),
    "all matmuls saved, stopped early": (f"{_ALL_MATMULS} ac.early_stop=true", 8, 4),
    "every third recomputed to the end": (f"{_EVERY_THIRD} ac.early_stop=false", 10, 2),
    "every third recomputed is never needed": (f"{_EVERY_THIRD} ac.early_stop=true", 8, 2),
    "every layer": ("ac=selective_layer ac.ac_freq=1 ac.early_stop=false", 12, 0),
    "every layer, stopped before the last product": (
        "ac=selective_layer ac.ac_freq=1 ac.early_stop=true",
        10,
        0,
    ),
    "full recomputes all four": ("ac=full ac.early_stop=false", 12, 0),
    "full stops before the last product": ("ac=full ac.early_stop=true", 10, 0),
    "offload keeps all on the host": ("ac=offload", 8, 0),
}


@pytest.mark.parametrize(("overrides", "flops", "saved"), CASES.values(), ids=CASES)
def test_backward_flops_and_saved_bytes(overrides: str, flops: int, saved: int) -> None:
    (experiment,) = experiments([[*_MODEL, *overrides.split()]])
    batch = experiment.model.fixed_batch()
    assert batch is not None
    report = instrument(assemble(experiment, torch.device("cpu"), None, batch), batch)
    storages = report.memory.largest_saved  # fewer than it may list
    of_generator = sum(storage.bytes for storage in storages if storage.op == "torch.get_rng_state")
    assert report.work.backward_flops == flops * UNIT_FLOPS
    assert report.memory.saved_bytes - of_generator == saved * UNIT_BYTES

    model = Toy()
    experiment.ac.apply(model)
    measured = measure(model, torch.randn(512, 512, requires_grad=True))
    assert measured.forward_flops == 4 * UNIT_FLOPS
    assert measured.backward_flops == flops * UNIT_FLOPS
    assert measured.saved_bytes == saved * UNIT_BYTES

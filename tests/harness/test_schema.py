from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.errors import HydraException

from harness.cli import explain
from harness.data import data_specs
from harness.errors import ConfigError
from harness.experiment import Experiment
from harness.launch import Run
from harness.mesh import Mesh
from harness.models import families
from harness.protocol import Protocol
from harness.report.publisher import Tracker
from harness.schema import CHOICE_KEYS, settings
from harness.store import trial_id
from strategies import ac_variants, chunk_variants, shard_variants
from tests.harness.composing import CONF, composed, experiment_of, options_of, point_of

REQUIRED = {
    ("model", "python"): "model.factory=tests.harness.user_models:healthy",
    ("data", "tokens"): "data.path={tokens}",
}
"""What an option cannot do without."""

CHOICES = [
    pytest.param(group, option, id=f"{group}={option}")
    for group in ("model", "mesh", "ac", "chunk", "shard", "data", "protocol")
    for option in options_of(group)
]
TOP_LEVEL = (
    "ac, batch_size, chunk, compile, data, dtype, learning_rate, mesh, model, name, optimizer, outputs_dir, "
    "protocol, rerun, seed, sequence_length, shard, strict, {sweep}tracker, wrap_order"
)
FULL = "early_stop, layers_fqn, module_classes, offload, preserve_rng_state, use_reentrant"
MESH = (
    "cpu_offload, device, dp_replicate, dp_shard, fsdp, nodes, reshard_after_forward, sharding_strategy, tp, "
    "use_orig_params"
)
PERHAPS = "must be true or false, got 'perhaps'"


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16) % 256)
    return path


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_option_of_every_group_is_an_experiment(group: str, option: str, tokens: Path) -> None:
    needed = REQUIRED.get((group, option), "").format(tokens=tokens)
    experiment = experiment_of(f"{group}={option} {needed}")
    assert hash(experiment) == hash(pickle.loads(pickle.dumps(experiment)))
    assert pickle.loads(pickle.dumps(experiment)) == experiment
    assert json.loads(json.dumps(experiment.to_dict())) == experiment.to_dict()

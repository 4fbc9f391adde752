"""The listing of regions and loops that `show=chunks` prints, for given models and budgets, as golden files.

    python -m tests.strategies.chunk.test_show        # writes them anew; read the difference

Models hold no memory. The command line shows the plan of a training step; the plan of forward alone is what
a model in evaluation has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.trials import experiments
from harness.trial.without_memory import _without_memory, show

GOLDEN = Path(__file__).parents[2] / "golden"
MODELS = {
    "gpt": (
        "model=gpt_nano",
        "model.n_layers=2",
        "model.width=96",
        "model.hidden_width=384",
        "sequence_length=512",
    ),
    "evoformer": (
        "model=evoformer", "model.n_layers=1", "model.msa_width=32", "model.pair_width=64",
        "model.n_sequences=8", "model.n_residues=16",
    ),
    # the GPT-2 of AutoChunk's tests
    "hf_gpt2": ("model=hf_gpt2", "sequence_length=512"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A listing; `fraction` is budget / activation peak without chunks."""

    model: str
    sort: str
    fraction: float

    @property
    def path(self) -> Path:
        return GOLDEN / f"chunks_{self.model}_{self.sort}_{self.fraction}.txt"

    def text(self) -> str:
        budget = ("batch_size=1", "chunk=budget", f"chunk.fraction={self.fraction}")
        (experiment,) = experiments([(*MODELS[self.model], *budget)])
        if self.sort == "training":
            return show(experiment, "chunks") + "\n"
        model, sample = _without_memory(experiment.model, (1, experiment.sequence_length))
        with torch.no_grad():
            return experiment.chunk.view("chunks", model.eval(), sample.inputs) + "\n"


LISTINGS = [
    Listing(model="gpt", sort="forward", fraction=0.5),
    Listing(model="gpt", sort="forward", fraction=0.4),
    Listing(model="gpt", sort="training", fraction=0.5),
    Listing(model="gpt", sort="training", fraction=0.3),
    Listing(model="evoformer", sort="forward", fraction=0.5),
    Listing(model="hf_gpt2", sort="forward", fraction=0.5),
    Listing(model="hf_gpt2", sort="training", fraction=0.3),
]


BY_DEFAULT = ("chunks_gpt_forward_0.5", "chunks_gpt_training_0.3", "chunks_hf_gpt2_training_0.3")


@pytest.mark.parametrize(
    "listing",
    [
        pytest.param(
            each, id=each.path.stem, marks=[] if each.path.stem in BY_DEFAULT else pytest.mark.matrix
        )
        for each in LISTINGS
    ],
)
def test_regions_and_code_are_those_of_the_golden_file(listing: Listing) -> None:
    assert listing.text() == listing.path.read_text(encoding="utf-8")


def test_every_golden_file_is_compared() -> None:
    assert set(GOLDEN.glob("chunks_*.txt")) == {listing.path for listing in LISTINGS}


if __name__ == "__main__":
    for each in LISTINGS:
        each.path.write_text(each.text(), encoding="utf-8")

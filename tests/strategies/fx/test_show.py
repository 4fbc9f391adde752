"""`python -m strategies.fx.show`: what it prints, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strategies.fx import show

ROOT = Path(__file__).parents[3]
HERE = "tests.strategies.fx.test_show"


def stack() -> tuple[nn.Module, Tensor]:
    """Return four blocks and an input; one tensor stands for a tuple of one."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.empty(2, 8)


def nothing() -> None:
    """Return no model."""


def test_without_arguments_it_shows_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([]) == 0
    assert capsys.readouterr().out == (ROOT / "tests/golden/nested_seed.txt").read_text(encoding="utf-8")


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([f"{HERE}:stack", "--labels", "{'1': 0, '2': [0, 1]}"]) == 0
    assert capsys.readouterr().out == (
        "0\n"
        "region 0\n"
        "    1\n"
        "    region 0_1\n"
        "        2\n"
        "3\n"
        "\n"
        "# forward of the model\n"
        "def forward(self, input_1):\n"
        "    def checkpoint_0(self, _0):\n"
        "        def checkpoint_0_1(self, _1):\n"
        "            _2 = self._2(_1)  # float32 (2, 8)\n"
        "            return _2\n"
        "\n"
        "        _1 = self._1(_0)  # float32 (2, 8)\n"
        "        _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0_1, _1, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "        return _2\n"
        "\n"
        "    _0 = self._0(input_1)  # float32 (2, 8)\n"
        "    _2 = torch.utils.checkpoint.checkpoint(self.checkpoint_0, _0, use_reentrant=False)"
        "  # float32 (2, 8)\n"
        "    _3 = self._3(_2)  # float32 (2, 8)\n"
        "    return (_3,)\n"
    )


REFUSED = {
    "a gap": (
        ["--labels", "{linear1: 0, linear3: 0}"],
        (
            "ac.labels: region 0 ends at 'linear1' and begins again at 'linear3'; 'linear2' stands between: "
            "put what is between into the region, or give the second part another index\n"
        ),
    ),
    "a module that is not there": (
        ["nowhere:make", "--levels", "[1]"],
        "factory: 'nowhere:make' is not there: No module named 'nowhere'; use package.module:function\n",
    ),
    "a factory of nothing": (
        [f"{HERE}:nothing", "--levels", "[1]"],
        "factory: must return (model, positional inputs) and perhaps a loss, got NoneType\n",
    ),
    "a file that is not there": (
        ["--labels-file", "nowhere.yaml"],
        "ac.labels_file: cannot be read: [Errno 2] No such file or directory: 'nowhere.yaml'\n",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(words) == 2
    assert capsys.readouterr().err == message


def test_it_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strategies.fx.show"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("region 0\n")

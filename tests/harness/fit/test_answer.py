# ruff: noqa: E501 (a command and what is said about it stand on one line)
"""The whole answer: what it predicts is what is measured, and its files hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from harness.command_line.fit_command import run
from harness.command_line.fit_words import asked
from harness.fit.answer import _remedies, answer
from harness.fit.options import Option
from harness.fit.predicting import Predictions
from harness.fit.screen import MOST_LINES, screen
from harness.fit.written import text_of
from strategies import chunk_variants
from strategies.ac.budget import Budget
from tests.harness.predict.measured_step import measured_step

TINY = [
    "gpt_nano",
    "--batch",
    "16",
    "--seq",
    "64",
    "n_layers=3",
    "width=32",
    "hidden_width=64",
    "n_heads=2",
    "--on=epyc_9004",
]
_FITS_NONE, _NEEDS_RULES, _NOTHING = 1.0, 0.008, 0.0005


@pytest.mark.slow
def test_options_are_those_of_measured_steps(tmp_path: Path) -> None:
    found = answer(asked([*TINY, "--gib", str(_NEEDS_RULES)]).subject, is_proven=True).written(tmp_path)
    assert found.use is not None
    assert (found.use.fits, found.use.verdict) == (True, "neutral")
    assert not found.plain.fits
    for option in found.options:
        measured = measured_step(option.experiment).memory
        assert (option.variant, option.peak_bytes) == (option.variant, measured.peak_bytes)
        assert option.saved_bytes == measured.saved_bytes
    assert {"none", "full", "selective_op"} <= {each.variant for each in found.options}
    assert len(screen(found).splitlines()) <= MOST_LINES
    assert (tmp_path / f"apply_{found.use.variant}.py").is_file()
    assert found.code() == (tmp_path / f"apply_{found.use.variant}.py").read_text("utf-8")
    assert isinstance(found.apply(found.subject.experiment.model.build()), nn.Module)


def test_a_step_that_fits_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TINY, "--gib", str(_FITS_NONE), "--out", str(tmp_path / "fit")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("USE nothing: the plain step fits, ")
    assert lines[1].startswith("GPT: 3 GPTBlock in 'layers' (named) hold ")
    assert not [line for line in lines if "unproven" in line]
    assert lines[-1].startswith("measure: acbench ")
    assert sorted(each.name for each in (tmp_path / "fit").iterdir()) == [
        "apply_full.py",
        "apply_selective_op.py",
    ]


def test_where_nothing_fits_it_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run([*TINY, "n_layers=1", "--gib", str(_NOTHING), "--json", "--out", str(tmp_path / "fit")])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["use"]) == (1, None)
    assert found["remedies"]
    assert [each["variant"] for each in found["options"]] == ["none", "full", "selective_op", "offload"]
    assert [each["largest_batch"] for each in found["options"]] == [0, 0, 0, 0]
    assert set(found) >= {
        "model", "blocks", "hardware", "usable_bytes", "plain", "use", "options", "command", "unknown",
    }  # fmt: skip
    assert set(found["blocks"]) >= {"fqn", "count", "found", "saved_bytes", "covered_bytes"}
    assert set(found["plain"]) >= {"peak_bytes", "saved_bytes", "step_time_s", "fits"}


def _predictions(limit_bytes: int, *options: tuple[str, float, bool]) -> Any:
    """Return predictions whose `full` has 10 bytes of parameters, 10 of gradients, 20 of the optimizer."""
    memory = SimpleNamespace(parameter_bytes=10, gradient_bytes=10, optimizer_bytes=20)
    known = [SimpleNamespace(variant=name, step_time_s=step_s, fits=fits) for name, step_s, fits in options]
    found: Any = Predictions(
        subject=cast("Any", SimpleNamespace(limit_bytes=limit_bytes)),
        blocks=cast("Any", None),
        folder=Path(),
        tell=lambda _: None,
        options=cast("Any", known),
    )
    found._steps["full"] = SimpleNamespace(memory=memory)
    return found


@pytest.mark.parametrize(
    ("limit_bytes", "notes"),
    [
        pytest.param(40, [], id="activations alone decide"),
        pytest.param(
            39,
            [
                (
                    "parameters, gradients and optimizer alone take 40 B, so plans and chunks cannot help and are "
                    "not predicted"
                )
            ],
            id="nothing can help",
        ),
    ],
)
def test_what_stands_alone_is_said_once(limit_bytes: int, notes: list[str]) -> None:
    found = _predictions(limit_bytes)
    assert (found._stands_alone(), found.notes) == (bool(notes), notes)


@pytest.mark.parametrize(
    ("options", "may_be"),
    [
        pytest.param([("full", 1.3, False)], True, id="nothing fits"),
        pytest.param([("full", 1.3, False), ("offload", 1.2, True)], False, id="something faster fits"),
        pytest.param([("full", 1.3, False), ("offload", 1.28, True)], True, id="something as fast fits"),
        pytest.param([("full", 1.3, False), ("offload", 1.5, True)], True, id="something slower fits"),
        pytest.param([("full", 1.3, False), ("offload", 1.2, False)], True, id="what is faster does not fit"),
    ],
)
def test_chunks_are_predicted_where_they_may_be_the_answer(
    options: list[tuple[str, float, bool]], *, may_be: bool
) -> None:
    assert _predictions(40, *options)._chunks_may_be_used() is may_be


@pytest.mark.parametrize(
    ("bytes_of", "full_bytes", "traced", "chosen"),
    [
        pytest.param(lambda count: 1000 - 10 * count, 850, [13, 12], [12], id="equal blocks, from above"),
        pytest.param(lambda count: 1000 - 10 * count, 800, [10, 11, 12], [12], id="equal blocks, from below"),
        pytest.param(lambda count: 1000 - 10 * count, 500, [4, 5, 12], [12], id="equal blocks, from afar"),
        pytest.param(
            lambda count: 1000 - count**2, 744, [8, 9, 10, 11], [11], id="unequal blocks, from below"
        ),
        pytest.param(
            lambda count: 1000 - 20 * count + count**2, 600, [*range(5, 16)], [], id="later ones free nothing"
        ),
        pytest.param(lambda count: 700 + count, 850, [13, *range(12, 0, -1)], [1], id="fewer are better"),
        pytest.param(lambda _: 1000, 872, [15], [], id="the last block is needed"),
    ],
)
def test_as_few_first_blocks_as_fit_run_again(
    bytes_of: Callable[[int], int],
    full_bytes: int,
    traced: list[int],
    chosen: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _predictions(880)
    seen: list[int] = []
    taken: list[str] = []
    peaks = {"none": 1000, "full": full_bytes}

    def step_of(count: int) -> SimpleNamespace:
        seen.append(count)
        return SimpleNamespace(memory=bytes_of(count))

    found.subject.variant = lambda _, first: first
    found.subject.hardware = SimpleNamespace(needed_bytes=lambda memory: memory)
    monkeypatch.setattr("harness.fit.predicting.step_of", step_of)
    monkeypatch.setattr(Predictions, "names", [f"layers.{number}" for number in range(16)])
    monkeypatch.setattr(Predictions, "_of", lambda _, name: SimpleNamespace(peak_bytes=peaks[name]))
    monkeypatch.setattr(Predictions, "add", lambda _, variant, *_rest: taken.append(variant))
    found._first_blocks()
    assert (seen, taken) == (traced, [f"first_{count}" for count in chosen])


def test_a_defect_of_ours_is_not_said_to_be_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("harness.fit.answer.step_of", defect)
    with pytest.raises(KeyError, match="ours"):
        answer(asked(TINY).subject)


FACTORY = "tests.harness.user_models"
SHARED = (
    "SharedBlock: no module of it repeats; its classes save Body 2.4 KiB; name blocks by their class, "
    "--blocks Body; or put what repeats, or stages of it, into a ModuleList or Sequential of modules"
)


def test_an_option_that_differs_has_no_file_and_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{FACTORY}:writes_statistics", "--on=epyc_9004", "--out", str(tmp_path / "fit")]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("USE nothing: the plain step fits, ")
    options = [line.split() for line in lines if line.strip().startswith(("full", "selective_op"))]
    written = tmp_path / "fit" / "apply_full_rewind.py"
    assert {option[0]: option[-1] for option in options} == {
        "full": "differs",
        "full_rewind": str(written),
        "selective_op": "differs",
    }
    noted = [line for line in lines if "running_mean" in line]
    assert len(noted) == 1
    assert noted[0].startswith(
        "not known: full, selective_op differ: parity: buffer 'one.0.norm.running_mean' differs first at "
    )
    assert noted[0].endswith(
        "; forward changes state: use ac=full ac.rewind=true ac.module_classes=[NormedInBatch]"
    )
    assert list(written.parent.iterdir()) == [written]


def test_what_cannot_run_again_is_said_and_a_plan_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{FACTORY}:reads_a_growing_list", "--on=epyc_9004", "--gib=0.0049"]
    assert run([*words, "--out", str(tmp_path / "fit")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("USE budget (plan of acbench): ")
    (noted,) = [line for line in lines if "has no prediction: " in line]
    assert noted.startswith(
        "not known: full has no prediction: the recomputation of 'blocks.3' raises RuntimeError: "
    )


def test_a_model_that_knows_fewer_tokens_is_unproven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{FACTORY}:knows_few_words", "--batch=2", "--seq=8", "--on=epyc_9004"]
    run([*words, "--out", str(tmp_path / "fit")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("USE nothing, unproven: the plain step fits, ")
    table = [line for line in lines if line.strip().startswith(("USE  none", "full", "selective_op"))]
    assert [line.endswith("unproven") for line in table] == [True, True, True]
    (noted,) = [line for line in lines if line.startswith("not known: ")]
    assert noted == (
        "not known: nothing was proven: batch: the plain model's forward raises IndexError: index out of "
        "range in self; tokens are drawn below model.vocab_size, 256: give vocab_size=N, the rows of the "
        "embedding, where the factory takes it, else acbench model.vocab_size=N"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("nosuch", "FACTORY: 'nosuch' is no module:function, hf:ConfigClass or model that ships; ", id="no model"),
        pytest.param("gpt_nano wdth=3", "wdth: gpt_nano has no such field; did you mean 'width'?", id="a field"),
        pytest.param("gpt_nano foo", "command: 'foo' is no key=value; ", id="a word"),
        pytest.param("gpt_nano --on rtx40", "--on: unknown 'rtx40'; did you mean 'rtx4090'?", id="hardware"),
        pytest.param("gpt_nano --gib 0", "--gib: must be above 0, got 0.0", id="no memory"),
        pytest.param("gpt_nano --dtype fp8", "--dtype: must be one of own, fp32, bf16, bf16_mixed, got 'fp8'", id="dtype"),
        pytest.param("gpt_nano --mesh dp", "--mesh: unknown 'dp'; ", id="mesh"),
        pytest.param("gpt_nano --mesh pp=2", "--mesh: pp cuts a step into micro-batches", id="pp"),
        pytest.param("gpt_nano --mesh shard2_pp2", "--mesh: pp cuts a step into micro-batches", id="pp2"),
        pytest.param("gpt_nano --mesh dp_shard=x", "--mesh: 'dp_shard=x' is no size; write dp_shard=8,tp=2", id="size"),
        pytest.param("vit_nano --seq 3", "--seq: has no effect, 'vit_nano' draws samples of its own size; ", id="seq"),
        pytest.param("gpt_nano --batch x", "command: argument --batch: invalid int value: 'x'; ", id="a number"),
        pytest.param(f"{FACTORY}:too_large_for_any_machine given=example --batch 3", "--batch: has no effect, the factory brings its own inputs; ", id="batch"),
        pytest.param(f"{FACTORY}:nothing", f"FACTORY: module '{FACTORY}' has no function 'nothing'", id="no function"),
        pytest.param(f"{FACTORY}:healthy widht=3", "widht: 'tests.harness.user_models:healthy' has no such argument; ", id="argument"),
        pytest.param(f"{FACTORY}:too_large_for_any_machine", "FACTORY: 'tests.harness.user_models:too_large_for_any_machine' raised TypeError: ", id="needs an argument"),
        pytest.param(f"{FACTORY}:too_large_for_any_machine given=example", "FACTORY: no blocks found in Linear: ", id="no blocks"),
        pytest.param(f"{FACTORY}:shared_block", f"FACTORY: no blocks found in {SHARED}", id="a shared block"),
        pytest.param(f"{FACTORY}:shared_block --blocks body", "--blocks: must name a ModuleList, ModuleDict or Sequential of SharedBlock, got 'body'; name blocks by their class, --blocks Body\n", id="no container"),
        pytest.param(f"{FACTORY}:shared_block --blocks Bdy", "--blocks: 'Bdy' is no class of a module in SharedBlock; did you mean 'Body'? classes are: Body, Linear", id="no class"),
        pytest.param(f"{FACTORY}:raises", "FACTORY: the plain step raised ValueError: the width is odd (user_models.py, line ", id="the model raises"),
    ],
)  # fmt: skip
def test_what_is_refused_says_the_remedy_and_leaves_no_file(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--on" in line else ["--on", "epyc_9004"]
    assert run([*line.split(), *device, "--out", str(tmp_path / "fit")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"acbench-fit: {message}")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "fit").exists()


def test_a_file_that_needs_acbench_says_what_proves_it(capsys: pytest.CaptureFixture[str]) -> None:
    option = Option(
        variant="budget", title="plan of acbench", experiment=SimpleNamespace(ac=Budget(layers_fqn="layers", fraction=0.5), chunk=chunk_variants["none"]()),  # type: ignore[arg-type]
        overrides=("ac=budget", "ac.fraction=0.5"), peak_bytes=1, saved_bytes=1, extra_flops=0, step_time_s=1.0,
        slowdown=1.0, fits=True, bound_by="host", needs_acbench=True,
    )  # fmt: skip
    text = text_of(option, "m:make", ["layers.0"], "acbench model=python model.factory=m:make")
    assert text is not None
    with pytest.raises(SystemExit) as ended:
        exec(text, {"__name__": "__main__"})
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "this file has no --check; acbench model=python model.factory=m:make ac=budget ac.fraction=0.5 proves it\n",
    )


@pytest.mark.parametrize(
    ("least_plan_bytes", "named"),
    [
        pytest.param(None, "a device with 20.0 MiB usable (--gib 0.019532)", id="no plan was sought"),
        pytest.param(20 << 20, "a device with 20.0 MiB usable (--gib 0.019532)", id="plans need more"),
        pytest.param(
            9 << 20, "a device with 9.5 MiB usable for budget (--gib 0.009252)", id="a plan is the least"
        ),
    ],
)
def test_a_device_is_named_with_its_bytes_and_no_option_that_is_none(
    least_plan_bytes: int | None, named: str
) -> None:
    option = SimpleNamespace(
        variant="none", verdict="neutral", largest_batch=0, peak_bytes=19 << 20, experiment=None
    )
    wrong = SimpleNamespace(variant="full", verdict="differs", largest_batch=8, peak_bytes=1, experiment=None)
    subject = SimpleNamespace(margin=0.05)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("harness.fit.answer._ranks", lambda *_given: None)
        assert _remedies(subject, [option, wrong], least_plan_bytes) == [named]  # type: ignore[arg-type,list-item]


@pytest.mark.slow
def test_what_would_fit_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "n_layers=1", "--gib", "0.0008", "--no-proof", "--out", str(tmp_path / "fit")]
    assert run([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["plain"]["peak_bytes"] > found["least_plan_bytes"] > found["usable_bytes"]
    assert min(each["peak_bytes"] for each in found["options"]) > found["usable_bytes"] * (
        1 - found["margin"]
    )
    named = [re.findall(r"--(?:batch|mesh|gib) [\w.=]+", each) for each in found["remedies"]]
    assert all(len(each) == 1 for each in named)
    assert [each[0].split()[0] for each in named] == ["--mesh", "--gib"]
    for (remedy,) in named:
        assert run([*words, *remedy.split()]) == 0
        assert capsys.readouterr().out.startswith("USE ")

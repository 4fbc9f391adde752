"""What is said of a server when the deadline has passed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.report.wandb.server_answers import last_answer

KEY = "0" * 40
RETRY = "api: retrying HTTP error"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param([], "the server gave no answer", id="none"),
        pytest.param([{"msg": "runsync: starting to read"}], "the server gave no answer", id="nothing yet"),
        pytest.param(
            [
                {"msg": RETRY, "status": 502, "body": "<html>bad\ngateway</html>"},
                {"msg": RETRY, "status": 500, "body": "oops"},
                {"msg": "something else"},
            ],
            "the server's last answer: HTTP 500 oops",
            id="an error",
        ),
        pytest.param([{"status": 429}], "the server's last answer: HTTP 429", id="without words"),
        pytest.param(
            [{"msg": "api: retrying error", "error": "dial tcp: connection refused"}],
            "the last request failed: dial tcp: connection refused",
            id="nobody there",
        ),
        pytest.param(
            [{"status": 401, "body": f"bad key {KEY}, header Basic YXBpOg== \x1b[31m"}],
            "the server's last answer: HTTP 401 bad key ..., header Basic ...",
            id="credentials and control characters",
        ),
        pytest.param(
            [{"status": 500, "body": "x" * 9999}],
            f"the server's last answer: HTTP 500 {'x' * 200}",
            id="a body without end",
        ),
    ],
)
def test_the_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], said: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logs = tmp_path / "wandb" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-sync.1.log").write_text("\n".join([*map(json.dumps, lines), "{torn"]))
    (logs / "debug-sync.0.log").write_text(json.dumps({"status": 418}))
    os.utime(logs / "debug-sync.0.log", (0, 0))
    assert last_answer(tmp_path, since_s=1.0) == said

"""`assert_neutral` as a fixture: `pytest_plugins = ["harness.check.fixtures"]` in conftest.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from harness.check.neutrality import assert_neutral as check
from harness.check.not_neutral import Neutrality


@pytest.fixture(name="assert_neutral")
def assert_neutral_fixture(record_property: Callable[[str, object], None]) -> Callable[..., Neutrality]:
    """Return `assert_neutral`; what it finds neutral is in the JUnit report, with the bytes that it saves."""

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> Neutrality:
        found = check(*args, **kwargs)
        record_property("acbench_verdict", found.verdict)
        record_property("acbench_saved_bytes", found.saved_bytes)
        record_property("acbench_plain_saved_bytes", found.plain_saved_bytes)
        return found

    return checked

from __future__ import annotations

from typing import Any

from docs.tools.compatibility import release_of, tables


def _content(torch: str, saved_bytes: int, **changes: Any) -> dict[str, Any]:
    results = {
        "facts": {"reduces in": "float32", "asks": True},
        "numbers": {"ac=full": {"verdict": "neutral", "saved_bytes": saved_bytes, "forward_flops": 5}},
        "tests": {"fsdp": {"passed": 3, "failed": 0, "skipped": 1, "failures": {}}},
    }
    return {"environment": {"torch": torch, "python": "3.12.1"}, "results": results | changes}


def test_a_column_for_each_release() -> None:
    failed = {"fsdp": {"passed": 2, "failed": 1, "skipped": 1, "failures": {"a.py::test_b": "assert 1 == 2"}}}
    old = _content("2.11.0", 4096, tests=failed, facts={"reduces in": "bfloat16"})
    assert tables([release_of(old), release_of(_content("2.13.0+cpu", 8192))]) == (
        """\
| what runs | torch 2.11.0, Python 3.12.1 | torch 2.13.0, Python 3.12.1 |
| --- | --- | --- |
| fsdp | 2 of 3 | 3 of 3 |
| trials neutral | 1 of 1 | 1 of 1 |

| fact | torch 2.11.0, Python 3.12.1 | torch 2.13.0, Python 3.12.1 |
| --- | --- | --- |
| reduces in | `bfloat16` | `float32` |
| asks | not run | yes |

1 of 2 numbers of 1 trials are the same in all of them. The others:

| number | torch 2.11.0, Python 3.12.1 | torch 2.13.0, Python 3.12.1 |
| --- | --- | --- |
| `ac=full`: saved_bytes | 4,096 | 8,192 |

Tests that fail:

* torch 2.11.0, Python 3.12.1: `a.py::test_b`: assert 1 == 2"""
    )


def test_releases_that_do_the_same_have_no_list() -> None:
    one = release_of(_content("2.13.0", 8))
    assert tables([one, one]).endswith("\n\n2 of 2 numbers of 1 trials are the same in all of them.")

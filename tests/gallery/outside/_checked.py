"""What `assert_neutral` says of a case, in few words."""

from __future__ import annotations

from typing import Any

from harness.check import NotNeutral, assert_neutral


def checked(make: Any, batch: Any, variant: Any, loss_fn: Any = None, **options: Any) -> Any:
    """Return what the check found, or the error with which it refused."""
    try:
        return assert_neutral(make, batch, variant, loss_fn, **options)
    except NotNeutral as failure:
        return failure.found
    except ValueError as error:
        return error


def remedy(make: Any, batch: Any, variant: Any, loss_fn: Any = None, **options: Any) -> str:
    """Return the verdict, and the remedy that the check names."""
    found = checked(make, batch, variant, loss_fn, **options)
    if isinstance(found, ValueError):
        return f"refused: {found}"
    said = getattr(found, "remedy", "")  # which earlier versions did not name
    return f"{found.verdict}, {said}" if said else str(found.verdict)

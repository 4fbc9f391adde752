"""What an entry of the gallery says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """A silent defect, as `tests.gallery.side_by_side` measures it without any probe of ours.

    Fields:
        cause: likely cause, a sentence.
        fix: what mends it, a sentence.
        parts: everything that differs from the plain model; empty where nothing is wrong but the promise.
        gradients: relative error of the worst gradient, `inf` where one is missing, None where no run
            repeats it.
        verdict: the right one.
        saves: whether bytes fall although the promise is broken.
        names: words of which the message must have one: module, parameter or value at fault.
        torch_says: what torch warns of; empty where it says nothing.
        link: thread upstream that reports this or the like; empty where we know none.
        needs: what must be installed beyond torch: `compiler` or the name of a package.
    """

    cause: str
    fix: str
    parts: tuple[str, ...] = ("gradients",)
    gradients: float | None = 0.0
    verdict: str = "differs"
    saves: bool = False
    names: tuple[str, ...] = ("blocks",)
    torch_says: str = ""
    link: str = ""
    needs: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A neighbour of a defect that is right.

    Fields:
        like: number of the defect that it looks like, 0 for none.
        why: what makes it right, a sentence.
        needs: as for a defect.
    """

    like: int
    why: str
    needs: str = ""

"""torch's save list on a tied weight under autocast: which remedy helps.

A public report: the second block finds the weight's cast in autocast's cache, and its recomputation does not.
"""

from __future__ import annotations

import torch

from tests.gallery.outside import autocast_recipe
from tests.gallery.outside._checked import remedy

BEFORE = "no answer: the check takes no autocast="
RIGHT = "differs, with torch.autocast(…, cache_enabled=False) it is neutral"


def answer() -> str:
    """Return verdict and remedy."""
    inputs = (torch.sin(torch.arange(48.0)).view(6, 8),)
    try:
        return remedy(autocast_recipe.tied, inputs, autocast_recipe.keep_products, autocast=torch.bfloat16)
    except TypeError:
        return BEFORE

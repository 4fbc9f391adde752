"""Parts that specifications of several families share: fields, their checks, FLOPs; no torch."""

"""Programs of nested regions: a recorded forward, cut into regions, as code."""

"""Faults of trials: models that fail, acts from outside, what a record must then say, and the sweeps."""

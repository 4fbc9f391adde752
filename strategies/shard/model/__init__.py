"""The choice of candidates for a whole model."""

"""Many trials: what is left to do, followed to its records."""

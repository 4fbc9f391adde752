"""The Hydra plugin of acbench."""

"""Sweeps on a private Slurm."""

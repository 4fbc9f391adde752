"""Snapshots of training steps, and how two of them compare."""

"""Files that switch activation checkpointing on with torch alone, and prove that they change nothing else."""

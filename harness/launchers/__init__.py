"""Ways to run the trials of a sweep: here, or through a scheduler."""

"""What every tracker is told of a trial, and the writers of those that are not W&B."""

"""What a report says: the records of a sweep, their labels, baselines and numbers."""

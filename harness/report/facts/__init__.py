"""The facts of a report: the records of a sweep, their labels, baselines and numbers."""

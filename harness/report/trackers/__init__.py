"""The description of a trial that every tracker gets, and the writers of those that are not W&B."""

"""A module of a user that cannot be imported."""

raise ValueError("no data here")

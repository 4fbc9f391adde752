"""Operators, described by the labels of their dimensions; `catalogue` is the table of all of them."""

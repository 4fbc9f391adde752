"""The cost of measuring a step and of checking it."""

"""The cost of the program next to the steps that it measures."""

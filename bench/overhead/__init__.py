"""The cost of the program beside the steps that it measures."""

"""Loops over slices: what they read, write and reuse, in forward and backward."""

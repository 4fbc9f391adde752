"""Chunking: parts of a forward that run as a loop over slices of their tensors, under a budget of bytes."""

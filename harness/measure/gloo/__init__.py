"""Waiting for gloo, and tensors that are lent to it."""

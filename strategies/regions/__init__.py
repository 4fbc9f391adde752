"""Regions around a block: recomputation, offloading, and the policy of saved tensors."""

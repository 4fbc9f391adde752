"""What stands around a block: recomputation, offloading, the policy of saved tensors."""

"""The same trial without a device: what it holds, computes and sends, from its own code on fake tensors."""

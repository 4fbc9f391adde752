"""Plans under a byte budget: what of each block is kept, offloaded or recomputed, and its least cost."""

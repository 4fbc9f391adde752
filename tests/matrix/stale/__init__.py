"""Random programs, changed at random between calls: what stands in for a model does as the model does."""

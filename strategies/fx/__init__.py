"""Graphs of a model's forward: recording, regions that nest, and the code they become."""

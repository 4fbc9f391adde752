"""Predictions and how near they are."""

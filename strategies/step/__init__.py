"""A training step: its operators, its storages, their lives."""

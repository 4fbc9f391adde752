"""Modules as people write them, with what activation checkpointing does to each in cases.yaml."""

"""Operator graphs: which storages live when, and what operators cost in bytes and seconds."""

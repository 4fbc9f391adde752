"""Estimates and the meter: which storages live when, and what operators cost in bytes and seconds."""

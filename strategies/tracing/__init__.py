"""Recorders of forwards, and what a recording depends on."""

"""Modules that several model families share."""

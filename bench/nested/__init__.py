"""Regions in regions."""

"""Meters: numbers with units; no formatting, no uploads, no knowledge of strategies."""

"""The harness: composes, launches, runs, measures, stores and reports trials."""

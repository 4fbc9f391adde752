"""Plans in the words of others."""

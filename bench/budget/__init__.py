"""Plans of ac=budget."""

"""The search for a plan whose peak fits a budget."""

"""Plans: what each block keeps, what that costs, and what no schedule goes below."""

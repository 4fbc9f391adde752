"""Which dimension goes through an operator, and where a loop can begin and end."""

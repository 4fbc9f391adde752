"""The dimension that goes through an operator, and where a loop can begin and end."""

"""What several model families are made of."""

"""What the check says of known cases."""

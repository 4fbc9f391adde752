"""Everything a person or W&B reads; built from records alone."""

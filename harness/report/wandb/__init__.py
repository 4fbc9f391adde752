"""Publishing records to W&B, in a process of its own."""

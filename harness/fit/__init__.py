"""What to switch on: every option predicted for a model and a device, the answer chosen and proven."""

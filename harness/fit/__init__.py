"""The answer to *what do I switch on?*: every option predicted for a model, one chosen and proven."""

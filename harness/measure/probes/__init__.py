"""Probes: further questions to a model and its plain twin, one a file, for trials and `assert_neutral`."""

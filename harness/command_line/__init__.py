"""The command line, and the one door from Hydra to an experiment; only this room knows Hydra."""

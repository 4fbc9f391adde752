"""Modules in the idioms of user code, written before the probes that judge them learnt to perturb."""

"""Proofs: programs that have a right answer, on all that they are about. `make matrix` runs them and resumes.

Each test is one row or one set of ranks, and is marked `matrix` but for the few that `make test` runs
(`REPEATED` in tests/conftest.py).
"""

"""Setups whose verdict, culprit and late reads were written down first; five were corrected after a run."""

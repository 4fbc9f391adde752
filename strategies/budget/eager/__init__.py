"""Planned blocks in eager torch: operators on tapes, run again in backward."""

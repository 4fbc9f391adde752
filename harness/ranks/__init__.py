"""Rank processes: started, watched and ended, with the culprit of a failure named."""

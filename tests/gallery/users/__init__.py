"""Models as users write them; `cases` has the verdict that each deserves."""

"""The calculus of sharding candidates: derived, counted, executed and verified."""

"""One trial inside one rank: build, measure, prove, time."""

"""`python -m strategies.shard.show linear --input 4,4,4,16 --out 32 --mesh 2,2`: candidates as a table."""

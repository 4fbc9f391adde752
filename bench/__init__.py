"""Questions of speed and exactness, each a command: `python -m bench.NAME`."""

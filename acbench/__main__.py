"""`python -m acbench`, which is `acbench`."""

from __future__ import annotations

from hydra_plugins.acbench.entry import main

if __name__ == "__main__":
    main()

"""`python -m harness.report` is `acbench-report`."""

from __future__ import annotations

import sys

from harness.report.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m beheld` is the `beheld` command."""

from __future__ import annotations

import sys

from beheld.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

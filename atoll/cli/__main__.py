"""`python -m atoll.cli`: the same as `atoll`."""

from __future__ import annotations

from atoll.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m atoll.cli.logged HOME LOG WORD...`: `atoll WORD...` with its output in a file.

For the Task Scheduler of Windows, which starts programs without environment, log or console.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run one command of `atoll` with its state in HOME and its output at the end of LOG."""
    home, log, *words = arguments
    # It is open as long as the process lives.
    file = Path(log).open("a", buffering=1, encoding="utf-8", newline="\n")  # noqa: SIM115
    for descriptor in (1, 2):  # of children, and of libraries that are not Python
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    from atoll import config
    from atoll.cli.main import main as command

    config.set_home(home)
    command(words)


if __name__ == "__main__":
    main(sys.argv[1:])

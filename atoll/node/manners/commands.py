"""The small programs of the system that sensors ask."""

from __future__ import annotations

import logging
import shutil
import subprocess

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0


class Commands:
    """Runs programs found in a search path; one that is not there says nothing."""

    def __init__(self, path: str | None = None) -> None:
        """Search `path` (folders as in PATH); None: where the system finds programs."""
        self._path = path

    def find(self, name: str) -> str | None:
        """Return where a program is."""
        return shutil.which(name, path=self._path)

    def ask(self, name: str, *arguments: str) -> str:
        """Return what a program prints; empty when it is not there, fails or takes too long."""
        program = self.find(name)
        if program is None:
            return ""
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.debug("%s did not answer: %s", name, error)
            return ""
        return done.stdout if done.returncode == 0 else ""

    def logind(self, *names: str) -> list[str]:
        """Return properties of the login manager as words, e.g. `true` or `1700000000000000`."""
        answer = self.ask(
            "busctl", "--system", "get-property", "org.freedesktop.login1",
            "/org/freedesktop/login1", "org.freedesktop.login1.Manager", *names,
        )  # fmt: skip
        words = [line.split()[-1] for line in answer.splitlines() if line.split()]
        return words if len(words) == len(names) else []

"""Programs that build something for a job, ended with everything they started."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from atoll import system
from atoll.node.processes import process_tree

OnLine = Callable[[str], None]

NICENESS = 5
"""Training goes first; but with 10 a build on a busy machine takes minutes."""

_KEPT_LINES = 200
_LAST_LINES = 12
_MAX_LINE = 2000


class BuildFailed(Exception):
    """A program ended with a status other than 0."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"{step}: {code}")
        self.step = step
        self.code = code


class Build:
    """Runs programs in sequence."""

    def __init__(self, *, on_line: OnLine) -> None:
        """Pass the programs' output to `on_line`."""
        self.pid = 0
        """The running program; 0: none."""
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def output(self) -> str:
        """Return the last part of the output."""
        return "\n".join(self._lines)

    def last_lines(self) -> str:
        """Return the last lines, for an error."""
        lines = [line for line in self._lines if line.strip()][-_LAST_LINES:]
        return "\n" + "\n".join(lines) if lines else "it printed nothing"

    async def run(self, command: list[str], *, cwd: Path) -> None:
        """Run a program to its end; on cancellation kill it and everything it started.

        Raises:
            BuildFailed: it ended with a status other than 0.
            OSError: it cannot be started.
        """
        cwd.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=system.before_program(niceness=NICENESS),
            **system.apart(),
        )
        self.pid = process.pid
        try:
            if process.stdout is not None:
                await self._listen(process.stdout)
            code = await process.wait()
        except BaseException:
            family = process_tree.tree(process.pid)
            process_tree.signal_tree(family, number=system.KILL)
            system.kill_group(process.pid)
            await asyncio.shield(process.wait())
            raise
        finally:
            self.pid = 0
        if code:
            raise BuildFailed(" ".join([Path(command[0]).name, *command[1:4]]), code)

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while block := await stream.read(65536):
            *lines, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._tell(line)
            if len(rest) > _MAX_LINE:
                self._tell(rest)
                rest = b""
        self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()[:_MAX_LINE]
        if text:
            self._lines.append(text)
            self._on_line(text)

"""Other systems: found where they can be imported, or installed into a folder of their own.

Nothing of them is in this repository. Each has an environment below the folder that `--rivals`
names, which takes torch, and whatever else Atoll has already, from the environment of this program.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
INSTALL_S, IMPORT_S = 900.0, 120.0
BORROWED = "borrowed.pth"


@dataclass(frozen=True)
class Rival:
    """An interpreter that can import a rival, or why there is none."""

    name: str
    python: str = ""
    reason: str = ""


def find(name: str, folder: Path | None) -> Rival:
    """Return a rival that is importable here, or below the folder; else install it there."""
    if importlib.util.find_spec(name) is not None:
        return Rival(name, sys.executable)
    if folder is None:
        return Rival(name, reason=f"{name} is not installed: give --rivals a folder for it")
    home = folder.resolve() / name
    python = home / "bin" / "python"
    if not _imports(python, name):
        if reason := _install(name, home):
            return Rival(name, reason=reason)
        if not _imports(python, name):
            return Rival(name, reason=f"{name} was installed, but cannot be imported")
    return Rival(name, str(python))


def requirements(name: str) -> Path:
    """Return the file with what a rival needs."""
    return HERE / f"requirements_{name}.txt"


def _imports(python: Path, name: str) -> bool:
    if not python.exists():
        return False
    return not _run([str(python), "-c", f"import {name}"], timeout_s=IMPORT_S)


def _install(name: str, home: Path) -> str:
    """Make an environment; return why that did not work, or nothing."""
    made = _run([sys.executable, "-m", "venv", str(home)])
    if made:
        return f"no environment for {name}: {made}"
    own = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    # What comes later in the path is taken only where the environment itself has nothing.
    (Path(own) / BORROWED).write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
    failed = _run([*pip, "-r", str(requirements(name))])
    return f"{name} could not be installed: {failed}" if failed else ""


def _run(command: list[str], *, timeout_s: float = INSTALL_S) -> str:
    """Run a command; return the last line of its errors if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return lines[-1] if done.returncode else ""

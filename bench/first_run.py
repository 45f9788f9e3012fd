"""What a first run takes: `python -m bench.first_run [--quick]`, one JSON object on stdout.

In an empty folder, with an empty environment; seconds count from the beginning:

    install_s       Atoll and all that training needs are installed
    version_s       `atoll --version` has answered
    first_loss_s    the demo has printed a loss
    end_s           the demo has ended
    installed_mb    size of the environment

`--way` says how: `pip` (a virtual environment and the wheel in dist/; modules are compiled when
they are loaded), `uvx` (the same in one command) or `make` (a clone and `make demo`). `--cold`
starts with empty package caches. With `pip` also, without torch, as where there is only a hub:

    base_s, base_mb             its installation
    help_cpu_s, status_cpu_s    processor seconds of `atoll --help` and `atoll status`, median
    first_paint_ms, page_bytes  the dashboard of an idle hub, opened by the link that the hub
                                printed, nothing cached, median; null where there is no playwright
                                or no Chromium

The command fails if a step does, and loads nothing but Python's standard library: `make try` and
continuous integration try the wheel with it, on any version of Python (`--python`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.kit.report import emit

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800.0
"""No step takes longer: cold caches bring gigabytes on some systems."""

QUICK = ("--nodes", "2", "--set", "train.steps=60")
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
MEGABYTE = 1e6
PAGES = 5

TIMED = """
import atexit, sys, time
atexit.register(lambda: print(time.process_time(), file=sys.stderr))
from atoll.cli.main import main
main(sys.argv[1:])
"""
"""A command that ends with the processor seconds of its process."""

LOGIN = """
import sys
from atoll.cli.hub_access import KnownHub, remember
remember(KnownHub(sys.argv[1], sys.argv[2], operator=True, ca=sys.argv[3]))
"""

PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"
OPENED = """
(() => {
  const all = ['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind));
  return [
    performance.getEntriesByName('first-contentful-paint')[0].startTime,
    all.reduce((sum, entry) => sum + entry.transferSize, 0),
  ];
})()
"""


class Failed(Exception):
    """A step of a first run failed; the message says which, and what it printed."""


class Place:
    """An empty folder with its own home, and one way to install Atoll there."""

    def __init__(self, folder: Path, *, wheel: Path, python: str, cold: bool) -> None:
        """Prepare; nothing is installed yet."""
        self.folder, self._wheel, self._python = folder, wheel, python
        own = {"ATOLL_HOME": str(folder / "home"), "COLUMNS": "200"}
        if cold:
            own |= {f"{name}_CACHE_DIR": str(folder / "cache" / name) for name in ("PIP", "UV")}
        foreign = re.compile(r"PYTHON(PATH|DONTWRITEBYTECODE)|VIRTUAL_ENV|ATOLL_|MAKE|MFLAGS")
        rest = {name: text for name, text in os.environ.items() if not foreign.match(name)}
        self._environment = {**rest, **own}

    # ------------------------------------------------------------------- ways to install

    def by_pip(self, extra: str = "") -> Path:
        """Install the wheel into a virtual environment; return the environment."""
        target = self.folder / f"environment{extra}"
        self.run(self._python, "-m", "venv", str(target))
        self.run(
            str(target / SCRIPTS / "python"), "-m", "pip", "install", "-q", "--no-compile",
            "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"),
            f"{self._wheel}{extra}",
        )  # fmt: skip
        return target

    def by_uvx(self) -> tuple[list[str], Path]:
        """Have uv make an environment; return the start of every command, and the environment.

        The build of torch is this machine's, as the README says it; where that cannot be had, it is
        the package index's.
        """
        if shutil.which("uv") is None:
            raise Failed("uv is not on the path: pip install uv")
        uvx = ["uv", "tool", "run", "-q", "--python", self._python]
        uvx += ["-c", str(ROOT / "constraints.txt"), "--from", f"{self._wheel}[train]"]
        ask = ["python", "-c", "import sys; print(sys.prefix)"]
        fitting = [*uvx[:3], "--torch-backend", "auto", *uvx[3:]]
        try:
            return [*fitting, "atoll"], Path(self.run(*fitting, *ask).strip())
        except Failed as error:
            sys.stderr.write(f"without --torch-backend: {error}\n")
        return [*uvx, "atoll"], Path(self.run(*uvx, *ask).strip())

    def by_make(self) -> Path:
        """Clone this repository; return the virtual environment that its Makefile makes."""
        clone = self.folder / "clone"
        self.run("git", "clone", "-q", str(ROOT), str(clone))
        self.run("make", "-s", "-C", str(clone), f"PYTHON={self._python}", ".venv/.train")
        return clone / ".venv"

    # -------------------------------------------------------------------------- commands

    def popen(self, *words: str) -> subprocess.Popen[str]:
        """Start a command whose output, errors included, is read."""
        return subprocess.Popen(
            words, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            errors="replace",
        )  # fmt: skip

    def run(self, *words: str, code: int = 0) -> str:
        """Return what a command printed.

        Raises:
            Failed: it ended with another exit status than `code`.
        """
        with self.popen(*words) as popen, limited(popen):
            said, _ = popen.communicate()
        if popen.returncode != code:
            raise Failed(f"{' '.join(words)} ended with {popen.returncode}: {said[-3000:]}")
        return said


@contextmanager
def limited(popen: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that is still there after `LIMIT_S`."""
    guard = threading.Timer(LIMIT_S, popen.kill)
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def size_mb(folder: Path) -> float:
    """Return the size of all files of a folder, without what links lead to."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / MEGABYTE


# ------------------------------------------------------------------------------------- training


def first_run(place: Place, *, way: str, quick: bool) -> dict[str, float]:
    """Install Atoll and run its demo; return the figures.

    Raises:
        Failed: a step failed, or did not print what it should.
    """
    began = time.perf_counter()
    found: dict[str, float] = {}
    if way == "uvx":
        atoll, environment = place.by_uvx()
    else:
        environment = place.by_make() if way == "make" else place.by_pip("[train]")
        atoll = [str(environment / SCRIPTS / "atoll")]
    found["install_s"] = time.perf_counter() - began
    if not re.fullmatch(r"atoll \d+\.\d+\.\d+\S*\s*", said := place.run(*atoll, "--version")):
        raise Failed(f"atoll --version printed {said!r}")
    found["version_s"] = time.perf_counter() - began
    demo = [*atoll, "demo", *(QUICK if quick else ())]
    if way == "make" and not quick:
        demo = ["make", "-s", "-C", str(place.folder / "clone"), "demo"]
    lines = []
    with place.popen(*demo) as popen, limited(popen):
        assert popen.stdout is not None
        for line in popen.stdout:
            lines.append(line)
            if "first_loss_s" not in found and re.search(r"\| loss \d", line):
                found["first_loss_s"] = time.perf_counter() - began
    found["end_s"] = time.perf_counter() - began
    said = "".join(lines)
    if popen.returncode or not re.search(r"replicas identical\s+yes", said):
        raise Failed(f"the demo ended with {popen.returncode}: {said[-3000:]}")
    found["installed_mb"] = size_mb(environment)
    return found


# ------------------------------------------------------------------------------- without torch


def without_torch(place: Place, *, repeats: int) -> dict[str, float | None]:
    """Install what a hub needs; return what it, the commands and the page cost.

    Raises:
        Failed: a step failed, or did not print what it should.
    """
    began = time.perf_counter()
    environment = place.by_pip()
    found: dict[str, float | None] = {"base_s": time.perf_counter() - began}
    found["base_mb"] = size_mb(environment)
    said = place.run(str(environment / SCRIPTS / "atoll"), "demo", code=2)
    if "pip install 'atoll[train]'" not in said:
        raise Failed(f"without torch, atoll demo does not say what to install: {said}")
    python = str(environment / SCRIPTS / "python")
    found["help_cpu_s"] = cpu_s(place, python, "--help", repeats=repeats)
    with running_hub(place, python) as hub:
        place.run(python, "-c", LOGIN, hub["url"], hub["operator_token"], hub["ca"])
        found["status_cpu_s"] = cpu_s(place, python, "status", repeats=repeats)
        found |= page(f"{hub['url']}/?token={hub['operator_token']}")
    return found


def cpu_s(place: Place, python: str, *words: str, repeats: int) -> float:
    """Return the median of a command's processor seconds, after a first call that compiles."""
    said = [place.run(python, "-c", TIMED, *words) for _ in range(repeats + 1)]
    return statistics.median(float(one.split()[-1]) for one in said[1:])


@contextmanager
def running_hub(place: Place, python: str) -> Iterator[dict[str, str]]:
    """Run a hub; give what it printed when it was ready.

    Raises:
        Failed: it did not start.
    """
    data = ["--data", str(place.folder / "hub"), "--jobs", str(place.folder / "runs")]
    with place.popen(python, "-m", "atoll.hub", *data) as popen, limited(popen):
        assert popen.stdout is not None
        try:
            line = popen.stdout.readline()
            if not line.startswith("{"):
                raise Failed(f"the hub did not start: {line}")
            yield json.loads(line)
        finally:
            popen.terminate()


def page(address: str) -> dict[str, float | None]:
    """Return when the dashboard is first seen, and the bytes that it loaded."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    with suppress(ImportError):
        from playwright.sync_api import sync_playwright

        if chromium is not None:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
                )
                opened = [first_look(browser, address) for _ in range(PAGES)]
                browser.close()
            paint_ms, loaded = (statistics.median(row) for row in zip(*opened, strict=True))
            return {"first_paint_ms": paint_ms, "page_bytes": loaded}
    return {"first_paint_ms": None, "page_bytes": None}


def first_look(browser: Any, address: str) -> tuple[float, float]:
    """Open the dashboard with nothing cached; return milliseconds and bytes."""
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(address)  # returns when everything that the page names is loaded
    opened.wait_for_function(PAINTED)
    paint_ms, loaded = opened.evaluate(OPENED)
    context.close()
    return float(paint_ms), float(loaded)


# ----------------------------------------------------------------------------------------- command


def built_wheel() -> Path:
    """Return the wheel in dist/.

    Raises:
        Failed: there is none, or several.
    """
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise Failed(f"dist/ has {len(wheels)} wheels instead of one: make dist")
    return wheels[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_run", description=__doc__)
    parser.add_argument("--way", choices=("pip", "uvx", "make"), default="pip")
    parser.add_argument("--python", default=sys.executable, help="the Python to install into")
    parser.add_argument("--cold", action="store_true", help="begin with empty package caches")
    parser.add_argument("--quick", action="store_true", help="a demo of a few steps")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {"way": given.way, "cold": given.cold}
    if hasattr(os, "getloadavg"):  # not on Windows
        found["load"] = os.getloadavg()[0]
    try:
        wheel = Path() if given.way == "make" else built_wheel()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            place = Place(Path(folder), wheel=wheel, python=given.python, cold=given.cold)
            found |= first_run(place, way=given.way, quick=given.quick)
            if given.way == "pip":
                found |= without_torch(place, repeats=1 if given.quick else 5)
    except Failed as error:
        sys.exit(f"error: {error}")
    rounded = {
        name: round(one, 3) if isinstance(one, float) else one for name, one in found.items()
    }
    emit(rounded, [{"figure": name, "value": str(value)} for name, value in rounded.items()])


if __name__ == "__main__":
    main()
